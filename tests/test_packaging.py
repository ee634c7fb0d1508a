"""The package as it is installed: what the wheel holds, and that the clone's own folder does not hide it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import apgrad as ap

pytest.importorskip("hatchling", reason="the package is built by hatchling (the dev extra)")
pytestmark = pytest.mark.quick

ROOT = Path(ap.__file__).parent.parent


def built(hook, folder):
    """The wheel that pip would make in the clone."""
    program = f"import hatchling.build as backend; backend.{hook}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_holds_apgrad_alone(tmp_path):
    names = built("build_wheel", tmp_path).namelist()
    assert {name.split("/")[0] for name in names} == {"apgrad", f"apgrad-{ap.__version__}.dist-info"}
    wanted = [p for p in (ROOT / "apgrad").rglob("*") if p.suffix in (".py", ".json", ".npz", ".typed")]
    assert {name for name in names if name.startswith("apgrad/")} == {str(p.relative_to(ROOT)) for p in wanted}
    assert "apgrad/py.typed" in names and any(name.startswith("apgrad/mplp/trained/") for name in names)


def test_an_editable_install_is_found_in_the_folder_that_holds_the_clone(tmp_path):
    # There the clone's folder is an empty namespace package of the name `apgrad`, which comes before the installed one.
    site, above = tmp_path / "site", tmp_path / "above"
    site.mkdir(), above.mkdir()
    built("build_editable", site).extractall(site)
    (above / "apgrad").symlink_to(ROOT, target_is_directory=True)
    program = f"import site; site.addsitedir({str(site)!r}); import apgrad; "
    program += "print(apgrad.__file__, apgrad.adaptive.__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=above, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT / "apgrad" / "__init__.py"), "adaptive"]
