"""From the bytes of a body to requests that the engine has checked."""

from __future__ import annotations
