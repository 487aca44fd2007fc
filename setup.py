"""What pyproject.toml cannot say: requirements files hold the dependencies; configs/ and page.html go along."""

from pathlib import Path

from setuptools import find_packages, setup


def requirements(file: str) -> list[str]:
    """Returns the requirements of a file and of those it builds on (-r), without comments and requirements.txt."""
    found = []
    for line in Path(__file__).parent.joinpath(file).read_text("utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        if not requirement.startswith("-r "):
            found += [requirement] if requirement else []
        elif requirement != "-r requirements.txt":
            found += requirements(requirement.removeprefix("-r "))
    return found


setup(
    install_requires=requirements("requirements.txt"),
    extras_require={
        "gpu": requirements("requirements-gpu.txt"),
        "video": requirements("requirements-video.txt"),
        "storage": requirements("requirements-storage.txt"),
        "film": requirements("requirements-film.txt"),
        "export": requirements("requirements-export.txt"),
        "box2d": requirements("requirements-box2d.txt"),
        "jax-envs": requirements("requirements-jax-envs.txt"),
        "dev": requirements("requirements-dev.txt"),
        "deploy": requirements("deploy/requirements-host.txt"),
    },
    packages=[*find_packages(include=["apex_jax", "apex_jax.*"]), "apex_jax.configs"],
    package_dir={"apex_jax.configs": "configs"},
    package_data={"apex_jax.configs": ["*.yaml"], "apex_jax.operations": ["page.html"]},
)
