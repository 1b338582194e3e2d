"""The package list: fxpart, and the two top-level folders that are installed inside it."""

from setuptools import find_packages, setup

packages = find_packages(include=["fxpart", "fxpart.*"])
for folder in ("passes", "costmodels"):
    packages += [f"fxpart.{name}" for name in find_packages(include=[folder, f"{folder}.*"])]
setup(
    packages=packages,
    package_dir={
        "fxpart": "fxpart",
        "fxpart.passes": "passes",
        "fxpart.costmodels": "costmodels",
    },
)
