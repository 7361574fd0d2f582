"""Maps the top-level folders `kernels/` and `weights_tools/` into the d3engine package, builds the native library, and
fetches the libraries of the server's page.

They stand at the top of the repository because people look for them there, but are only ever importable as
`d3engine.kernels` and `d3engine.weights_tools`: a top-level module named `kernels` belongs to another project.

The library is no Python module, but plain C behind ctypes: one wheel serves every Python of a platform. Where there is
no C++ compiler the install goes on without it.
"""

import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

TOP_LEVEL = ("kernels", "weights_tools")
NATIVE = Path("kernels/native")
PAGE = Path("d3engine/server/page")
build = runpy.run_path(str(NATIVE / "build.py"))
page = runpy.run_path("d3engine/server/page_libraries.py")


def address():
    """That of the repository, where GitHub builds; a checkout knows none."""
    server, name = (os.environ.get(f"GITHUB_{part}") for part in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else None


def description():
    """The README, whose links and images lead to the repository where its address is known: an index shows no files."""
    text = Path("README.md").read_text(encoding="utf-8")
    if address() is None:
        return text
    place = f"{address()}/{{}}/{os.environ['GITHUB_REF_NAME']}/"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{place.format('raw')}", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{place.format('blob')}", text)


class BuildNative(build_ext):
    """Lets `build.py` compile; without a compiler it says what is missing, and what that costs."""

    is_built = False

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + Path(build["LIBRARY"]).suffix

    def build_extension(self, extension):
        target = Path(self.get_ext_fullpath(extension.name)).absolute()
        target.unlink(missing_ok=True)  # what an earlier build has left must not go into a wheel as if it were new
        try:
            build["compile_library"](target, folder=NATIVE.absolute())
            self.is_built = True
        except build["BuildError"] as error:
            self.warn(
                f"the native library is left out: {error}. On a CPU d3engine then decodes with PyTorch alone, two to"
                " fifty times slower; install a C++ compiler (g++ or clang++) and then d3engine again"
            )

    def get_outputs(self):
        return super().get_outputs() if self.is_built else []


class FetchLibraries(build_py):
    """Brings the page's libraries with the package, where npm's registry can be reached."""

    def run(self):
        try:
            page["fetch"]()
        except page["LibraryError"] as error:
            self.warn(f"the server's page will show answers as plain text, without Markdown: {error}")
        if (PAGE / "vendor").is_dir():
            self.packages.append("d3engine.server.page.vendor")
        super().run()


class TagForEveryPython(bdist_wheel):
    """The wheel is bound to a platform by the library, and to nothing without one."""

    def get_tag(self):
        is_built = self.get_finalized_command("build_ext").is_built
        return "py3", "none", super().get_tag()[2] if is_built else "any"


# The bundled model's folder and the page's hold data alone, which setuptools wants to be told of as packages too.
packages = [*find_packages(include=["d3engine", "d3engine.*"]), "d3engine.demo_model", "d3engine.server.page"]
for folder in TOP_LEVEL:
    packages.append(f"d3engine.{folder}")
    packages.extend(f"d3engine.{folder}.{name}" for name in find_packages(folder))

setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={"Repository": address(), "Issues": f"{address()}/issues"} if address() else {},
    packages=packages,
    package_dir={"d3engine": "d3engine"} | {f"d3engine.{folder}": folder for folder in TOP_LEVEL},
    ext_modules=[
        Extension(
            "d3engine.kernels.native.libd3native",
            sources=sorted(str(path) for path in NATIVE.rglob("*.cpp")),
            depends=sorted(str(path) for path in (*NATIVE.rglob("*.h"), *NATIVE.rglob("*.inc"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "build_py": FetchLibraries, "bdist_wheel": TagForEveryPython},
)
