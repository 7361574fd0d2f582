"""Maps the top-level folders `kernels/` and `weights_tools/` into the d3engine package.

They stand at the top of the repository because people look for them there, but are only ever importable as
`d3engine.kernels` and `d3engine.weights_tools`: a top-level module named `kernels` belongs to another project.
"""

from setuptools import find_packages, setup

TOP_LEVEL = ("kernels", "weights_tools")

# The bundled model's folder holds data alone, which setuptools wants to be told of as a package too.
packages = [*find_packages(include=["d3engine", "d3engine.*"]), "d3engine.demo_model"]
for folder in TOP_LEVEL:
    packages.append(f"d3engine.{folder}")
    packages.extend(f"d3engine.{folder}.{name}" for name in find_packages(folder))

setup(
    packages=packages,
    package_dir={"d3engine": "d3engine"} | {f"d3engine.{folder}": folder for folder in TOP_LEVEL},
)
