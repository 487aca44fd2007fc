"""What pyproject.toml cannot say: requirements files hold the dependencies; configs/ and page.html go along."""

from pathlib import Path

from setuptools import find_packages, setup


def requirements(file: str) -> list[str]:
    """Returns the requirements of a file without its comments, and without those of the file it builds on (-r)."""
    text = Path(__file__).parent.joinpath(file).read_text("utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("-r ")]


setup(
    install_requires=requirements("requirements.txt"),
    extras_require={
        "gpu": requirements("requirements-gpu.txt"),
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
