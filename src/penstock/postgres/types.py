"""The types of a database, by OID: built-in ones, and what the catalog has of all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from penstock.core.queries import load
from penstock.postgres import values
from penstock.postgres.values import Converter, array_of, composite, text

_QUERIES: Final = load("penstock.postgres", "types.sql")


class TypeInfo(NamedTuple):
    """A type's row in pg_type, and its attributes; an OID of 0 is none."""

    oid: int
    schema: str
    name: str
    kind: str  # typtype: b base, c composite, d domain, e enum, m multirange, p pseudo, r range
    element: int = 0  # of a true array; int2vector, point and the like have none
    base: int = 0  # of a domain
    delimiter: str = ","
    attributes: tuple[tuple[str, int], ...] = ()  # of a composite


# Base types of extensions: their OIDs differ from database to database.
_BY_NAME: Final[dict[str, Converter]] = {
    "hstore": values.hstore, "vector": values.vector, "halfvec": values.vector,
}  # fmt: skip

# Each built-in type with its OID and that of its array; they never change between releases.
_BUILT_IN: Final[tuple[tuple[Converter | None, str], ...]] = (
    (None, "int2 21 1005, int4 23 1007, int8 20 1016, oid 26 1028"),
    (values.boolean, "bool 16 1000"),
    (values.floating, "float4 700 1021, float8 701 1022"),
    (values.binary, "bytea 17 1001"),
    (values.json, "json 114 199, jsonb 3802 3807"),
    (values.timestamp, "timestamp 1114 1115"),
    (values.timestamptz, "timestamptz 1184 1185"),
    (
        values.plain,
        "numeric 1700 1231, date 1082 1182, time 1083 1183, timetz 1266 1270, interval 1186 1187,"
        "uuid 2950 2951, inet 869 1041, cidr 650 651, macaddr 829 1040, macaddr8 774 775,"
        "bit 1560 1561, varbit 1562 1563, pg_lsn 3220 3221, xid 28 1011, xid8 5069 271,"
        "cid 29 1012, tid 27 1010, int2vector 22 1006, oidvector 30 1013, point 600 1017,"
        "lseg 601 1018, path 602 1019, box 603 1020, polygon 604 1027, line 628 629,"
        "circle 718 719, txid_snapshot 2970 2949, pg_snapshot 5038 5039",
    ),
    (
        text,
        "text 25 1009, varchar 1043 1015, bpchar 1042 1014, name 19 1003, char 18 1002,"
        "xml 142 143, money 790 791, tsvector 3614 3643, tsquery 3615 3645, gtsvector 3642 3644,"
        "jsonpath 4072 4073, aclitem 1033 1034, refcursor 1790 2201, regproc 24 1008,"
        "regprocedure 2202 2207, regoper 2203 2208, regoperator 2204 2209, regclass 2205 2210,"
        "regtype 2206 2211, regcollation 4191 4192, regrole 4096 4097, regnamespace 4089 4090,"
        "regconfig 3734 3735, regdictionary 3769 3770, int4range 3904 3905, numrange 3906 3907,"
        "tsrange 3908 3909, tstzrange 3910 3911, daterange 3912 3913, int8range 3926 3927,"
        "int4multirange 4451 6150, nummultirange 4532 6151, tsmultirange 4533 6152,"
        "tstzmultirange 4534 6153, datemultirange 4535 6155, int8multirange 4536 6157",
    ),
)


def _built_in() -> dict[int, Converter | None]:
    converters: dict[int, Converter | None] = {}
    for convert, types in _BUILT_IN:
        for entry in types.split(","):
            name, oid, array = entry.split()
            converters[int(oid)] = convert
            converters[int(array)] = array_of(convert, ";" if name == "box" else ",")
    return converters


_BUILT_IN_CONVERTERS: Final = _built_in()


def is_built_in(oid: int) -> bool:
    """Return whether a type's converter depends on nothing but the value."""
    return oid in _BUILT_IN_CONVERTERS


class Types:
    """The types of one database, and their converters by OID.

    Built-in types are known from the start. Others must be added first:
    `types.add(load_types(connection, types.unknown(oid)))`. A type dropped since the change was
    written stays unknown, and its values become strings.
    """

    def __init__(self, infos: Iterable[TypeInfo] = ()) -> None:
        self._infos: dict[int, TypeInfo] = {}
        self._converters = dict(_BUILT_IN_CONVERTERS)
        self.add(infos)

    def add(self, infos: Iterable[TypeInfo]) -> None:
        """Add types, or replace them; converters returned before are out of date then."""
        self._infos.update((info.oid, info) for info in infos)
        # Any converter may contain an older one of these types.
        self._converters = dict(_BUILT_IN_CONVERTERS)

    def unknown(self, oid: int) -> set[int]:
        """Return the OIDs to look up before `converter(oid)` is exact."""
        missing: set[int] = set()
        seen: set[int] = set()
        todo = [oid]
        while todo:
            oid = todo.pop()
            if oid in seen or oid in _BUILT_IN_CONVERTERS:
                continue
            seen.add(oid)
            info = self._infos.get(oid)
            if info is None:
                missing.add(oid)
                continue
            todo.extend(part for part in (info.element, info.base) if part)
            todo.extend(part for _, part in info.attributes)
        return missing

    def converter(self, oid: int) -> Converter | None:
        """Return the converter of a type; None if the type's text is JSON."""
        if oid not in self._converters:
            self._converters[oid] = text  # for a type that contains itself
            self._converters[oid] = self._build(oid)
        return self._converters[oid]

    def _build(self, oid: int) -> Converter | None:
        info = self._infos.get(oid)
        if info is None:
            return text
        if info.element:
            return array_of(self.converter(info.element), info.delimiter)
        if info.kind == "d":
            return self.converter(info.base)
        if info.kind == "c":
            return composite([(name, self.converter(part)) for name, part in info.attributes])
        if info.kind == "b":
            return _BY_NAME.get(info.name, text)
        return text


def load_types(connection: psycopg.Connection[Any], oids: Iterable[int]) -> list[TypeInfo]:
    """Return these types and all that they are made of, in one round trip.

    A type that does not exist (any more) is left out. The connection is an ordinary one: a
    replication connection takes no parameters.
    """
    asked = list(oids)
    if not asked:
        return []
    with connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_QUERIES["types"], {"oids": asked}).fetchall()
    return [
        TypeInfo._make([*scalars, tuple(zip(names or (), types or (), strict=True))])
        for *scalars, names, types in rows
    ]
