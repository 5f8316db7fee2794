"""Job scripts to begin with: ours, and those of the site, which replace ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from hpcsched.gateway.site import MAX_TEMPLATE_CHARS, our_job_templates, read_job_templates

OURS = sorted((Path(__file__).parents[3] / "etc" / "templates").glob("*.sh"))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_each_of_our_job_scripts_has_a_title_and_is_a_script(path: Path) -> None:
    found = read_job_templates([our_job_templates()])[path.stem]
    assert found.title
    assert found.description
    assert found.opens in ("open", "terminal")
    assert found.script.startswith("#!/bin/bash\n#HSUB --job-name=")
    subprocess.run(["bash", "-n"], input=found.script, text=True, check=True)


@pytest.mark.parametrize(
    ("package", "scripts"),
    [
        ("checkout/hpcsched", "checkout/etc/templates"),
        ("env/lib/python3.11/site-packages/hpcsched", "env/share/hpcsched/templates"),
        ("target/hpcsched", "target/share/hpcsched/templates"),
    ],
    ids=["checkout", "environment", "target"],
)
def test_our_job_scripts_are_found_wherever_pip_puts_them(tmp_path: Path, package: str, scripts: str) -> None:
    for folder in (package, scripts):
        (tmp_path / folder).mkdir(parents=True)
    assert our_job_templates(tmp_path / package) == tmp_path / scripts


def test_a_site_adds_job_scripts_and_replaces_ours(tmp_path: Path) -> None:
    (tmp_path / "jupyter.sh").write_text("#!/bin/sh\n# title: Our Jupyter\necho '# title: not this'\n# opens: no\n")
    (tmp_path / "plain.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "notes.txt").write_text("no script")
    found = read_job_templates([our_job_templates(), tmp_path])
    assert set(found) == {path.stem for path in OURS} | {"plain"}
    assert (found["jupyter"].title, found["jupyter"].opens) == ("Our Jupyter", "")
    assert found["jupyter"].script == "#!/bin/sh\necho '# title: not this'\n"
    assert (found["plain"].title, found["plain"].description) == ("plain", "")
    assert set(read_job_templates([tmp_path / "none"])) == set()


def test_files_that_are_no_job_scripts_are_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "long.sh").write_text("#" * (MAX_TEMPLATE_CHARS + 1))
    (tmp_path / "bytes.sh").write_bytes(b"#!/bin/sh\n\xff\n")
    (tmp_path / "folder.sh").mkdir()
    (tmp_path / "gone.sh").symlink_to("nowhere")
    assert read_job_templates([tmp_path]) == {}
    assert len(caplog.records) == 4
