"""The native library must exist wherever it can be built."""

import pytest

from d3engine.kernels.native.build import BuildError, find_compiler
from d3engine.kernels.native.library import LibraryMissing, library


@pytest.fixture(autouse=True, scope="session")
def native_library() -> None:
    try:
        library()
    except LibraryMissing as error:
        try:
            find_compiler()
        except BuildError as reason:
            pytest.skip(str(reason))
        pytest.fail(f"there is a compiler, but {error}")
