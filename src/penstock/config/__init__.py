"""The configuration: the file, the settings of each kind of sink, source and consumer."""

from __future__ import annotations

from typing import Final

STORE_VARIABLE: Final = "PENSTOCK_STORE_URL"
"""The variable that names the store where there is no file, and in an exported file."""
