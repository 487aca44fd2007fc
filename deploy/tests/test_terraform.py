"""Static checks of the Terraform configuration: style, variables, rules of security."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.tests.tools import TERRAFORM, Terraform, copy_of_terraform

pytestmark = [pytest.mark.deploy, pytest.mark.quick, pytest.mark.timeout(600)]

TESTS = sorted(path.name for path in (TERRAFORM / "tests").glob("*.tftest.hcl"))


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    terraform = Terraform(copy_of_terraform(tmp_path_factory.mktemp("static")))
    terraform.init()
    return terraform


def blocks(kind: str) -> dict[str, Any]:
    """Returns all blocks of a kind, by name, of the root configuration."""
    import hcl2

    found: dict[str, Any] = {}
    for path in sorted(TERRAFORM.glob("*.tf")):
        for block in hcl2.loads(path.read_text()).get(kind, []):
            found |= {name.strip('"'): body for name, body in block.items() if not name.startswith("__")}
    return found


@pytest.mark.terraform
def test_format_is_terraform_fmt(terraform: Terraform) -> None:
    assert terraform.run("fmt", "-check", "-recursive", "-diff") == ""


@pytest.mark.terraform
def test_configuration_is_valid(terraform: Terraform) -> None:
    assert json.loads(terraform.run("validate", "-json"))["diagnostics"] == []


@pytest.mark.terraform
@pytest.mark.parametrize("file", TESTS)
def test_terraform_test(terraform: Terraform, file: str) -> None:
    said = terraform.run("test", "-no-color", f"-filter=tests/{file}", seconds=600)
    assert re.search(r"^Success! [1-9]\d* passed, 0 failed\.", said, re.MULTILINE), said


GUIDE = (TERRAFORM / "README.md").read_text()
BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL))
COMMANDS = [*re.findall(r"`([^`\n]+)`", GUIDE), *BLOCKS.splitlines()]


def test_every_command_works_from_the_root_of_the_repository() -> None:
    printed = re.findall(r'^ +\w+ += "(.*)"', (TERRAFORM / "outputs.tf").read_text(), re.MULTILINE)
    used = [one for one in (*COMMANDS, *printed) if re.search(r"(?<!/)\bterraform [-a-z]+\S* \S", one)]
    assert len(used) > 5
    elsewhere = [one for one in used if re.search(r"(?<!/)\bterraform (?!-chdir=deploy/terraform )[-a-z]", one)]
    assert elsewhere == []
    assert not any(re.match(r"cd\b", command) for command in COMMANDS)


def test_guide_names_variables_and_outputs_that_there_are() -> None:
    packer = (TERRAFORM.parent / "packer/variables.pkr.hcl").read_text()
    known = {*blocks("variable"), *re.findall(r'variable "(\w+)"', packer)}
    named = {name for one in COMMANDS for name in re.findall(r"-var (\w+)=", one)}
    for example in re.findall(r"```hcl\n(.*?)```", GUIDE, re.DOTALL):
        named |= set(re.findall(r"^(\w+) +=", example, re.MULTILINE))
    assert len(named) > 5
    assert named <= known
    outputs = {name for one in COMMANDS for name in re.findall(r"terraform .*\boutput (?:-raw )?(\w+)", one)}
    assert {"commands"} <= outputs <= set(blocks("output"))
