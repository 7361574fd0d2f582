"""Fetches the JavaScript libraries of the server's page. Standard library only: an installer runs it.

    python d3engine/server/page_libraries.py      # fetches what is missing into d3engine/server/page/vendor

They are packages of npm, of fixed versions, each checked by the SHA-512 that stands here. Each brings its licence.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import sys
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

FOLDER = Path(__file__).parent / "page" / "vendor"
REGISTRY = "https://registry.npmjs.org"
VERSIONS = "versions.txt"
TIMEOUT_SECONDS = 30.0
MAX_BYTES = 2**24


class LibraryError(Exception):
    """A package that cannot be fetched, or is not the one that was asked for."""


class Library(NamedTuple):
    """A package of npm.

    Attributes:
        name: as npm has it.
        version: the only one that is taken.
        sha512: of the package file, in base64, as npm's `integrity` has it.
        files: a pattern of paths in the package -> the name here, in which \\1 is the pattern's group.
    """

    name: str
    version: str
    sha512: str
    files: dict[str, str]

    @property
    def url(self) -> str:
        return f"{REGISTRY}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


LIBRARIES = (
    Library(
        "markdown-it",
        "15.0.3",
        "+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        {r"dist/browser/markdown-it\.esm\.min\.mjs": "markdown-it.js", "LICENSE": "markdown-it.LICENSE"},
    ),
    Library(
        "@mdit/plugin-tex",
        "0.24.2",
        "nVKIJHQJHvgDByKMpCgFT6gdeEZUyzZby24BjCjxP2N10bkgK8IEwZIBu7G5n5WBw2D0kmFD4Top+YA2mjeiQQ==",
        {r"dist/cdn\.umd\.js": "tex.js", "LICENSE": "tex.LICENSE"},
    ),
    Library(
        "dompurify",
        "3.5.0",
        "LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
        {r"dist/purify\.min\.js": "purify.js", "LICENSE": "purify.LICENSE"},
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {r"es/highlight\.min\.js": "highlight.js", "LICENSE": "highlight.LICENSE"},
    ),
    Library(
        "katex",
        "0.19.1",
        "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {
            r"dist/katex\.min\.(js|css)": r"katex.\1",
            r"dist/fonts/(\w+-\w+\.woff2)": r"fonts/\1",
            "LICENSE": "katex.LICENSE",
        },
    ),
)


def is_fetched(folder: Path = FOLDER) -> bool:
    """Whether the folder has all libraries, of these versions."""
    note = folder / VERSIONS
    return note.is_file() and note.read_text() == _versions()


def fetch(folder: Path = FOLDER) -> None:
    """Put all libraries into the folder, or none; raises `LibraryError`."""
    if is_fetched(folder):
        return
    with TemporaryDirectory() as made:
        for library in LIBRARIES:
            _unpack(library, _download(library), Path(made, "vendor"))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(made, "vendor"), folder)
    (folder / VERSIONS).write_text(_versions())  # last: only a whole folder has it


def _versions() -> str:
    return "".join(f"{library.name} {library.version}\n" for library in LIBRARIES)


def _download(library: Library) -> bytes:
    try:
        with urllib.request.urlopen(library.url, timeout=TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(MAX_BYTES)
    except (OSError, HTTPException) as error:
        raise LibraryError(f"{library.url} cannot be fetched: {error}") from None
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != library.sha512:
        raise LibraryError(f"{library.url} is not the file that it was: its SHA-512 is another")
    return content


def _unpack(library: Library, package: bytes, folder: Path) -> None:
    left = set(library.files)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            for pattern, name in library.files.items():
                found = re.fullmatch(pattern, path)
                content = archive.extractfile(member) if found else None
                if found is None or content is None:
                    continue
                target = folder / found.expand(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = content.read()
                # Maps for debuggers are left out, so a browser must not ask for them.
                target.write_bytes(
                    re.sub(rb"\n//# sourceMappingURL=\S+\s*$", b"\n", text) if path.endswith("js") else text
                )
                left.discard(pattern)
    if left:
        raise LibraryError(f"{library.url} has no {' and no '.join(sorted(left))}")


def main() -> int:
    try:
        fetch()
    except LibraryError as error:
        print(f"The page shows answers as plain text: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{len(LIBRARIES)} libraries of the page, {size / 1e6:.1f} MB, are in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
