"""Documents name only what exists, and generated parts are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from api_pages import PAGES as GENERATED
from document_pictures import FOLDER, PICTURES

from fxpart.cli import VERBS
from fxpart.cli.explain import PAGES as EXPLAINED
from fxpart.cli.explain import RENAMED
from fxpart.errors import CODES

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = "fxpart/docs/what_users_ask_for.md"
PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for p in [*ROOT.glob("*.md"), *ROOT.glob("fxpart/docs/**/*.md"), *ROOT.glob("fxpart/errors.py")]
)


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    verbs = re.findall(r"(?:^ {4}|`)fxpart (?!explain FXP)([a-z]+)\b", read(page), re.MULTILINE)
    assert set(verbs) <= set(VERBS)


@pytest.mark.parametrize("page", PAGES)
def test_codes_exist(page: str) -> None:
    assert set(re.findall(r"\bFXP\d{3}\b", read(page))) <= set(CODES)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"(?m)^([a-z]+):", read("Makefile")))
    assert set(re.findall(r"`make ([a-z]+)`|^ {4}make ([a-z]+)", read(page), re.MULTILINE)) <= {
        pair for t in targets for pair in ((t, ""), ("", t))
    }


def torchrun_commands() -> list[str]:
    """Those that start something, of README and all pages and of what the code says."""
    text = "\n".join(read(page) for page in PAGES)
    found = re.findall(r"(?m)^ {4}torchrun ([^#\n]+)", text)
    found += re.findall(r"`torchrun\s([^`]+)`", text)
    words = [" ".join(command.replace("...", " ").split()) for command in found]
    return sorted({command for command in words if "fxpart" in command or ".py" in command})


@pytest.mark.parametrize("command", torchrun_commands())
def test_torchrun_takes_what_the_pages_say(command: str) -> None:
    """Its own options end where the program begins, and none of the program's is taken for one."""
    from torch.distributed.run import parse_args

    found = parse_args(command.split())
    assert found.training_script in ("fxpart", "script.py", "train.py")
    place = command.split().index(found.training_script)
    assert found.training_script_args == command.split()[place + 1 :]
    if found.module:
        assert "--run" not in found.training_script_args


def test_torchrun_takes_run_for_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Why the pages say --run-dir; a torchrun that no longer does needs no such word."""
    from torch.distributed.run import parse_args

    assert any("-m fxpart train" in c and "--run-dir" in c for c in torchrun_commands())
    with pytest.raises(SystemExit):
        parse_args(["-m", "fxpart", "train", "net.py:net", "--run", "runs/a"])
    assert "ambiguous option: --run" in capsys.readouterr().err


def test_paths_in_contributing_exist() -> None:
    paths = re.findall(r"`((?:fxpart|passes|costmodels|tests)/[\w./]*)`", read("CONTRIBUTING.md"))
    assert len(paths) > 15
    missing = [p for p in paths if not re.search("my_|nnn", p) and not (ROOT / p).exists()]
    assert not missing


def test_readme_lists_every_verb() -> None:
    rows = re.findall(r"(?m)^\| `fxpart ([a-z]+)", read("README.md"))
    assert sorted(rows) == sorted(VERBS)


def test_ci_runs_the_tests() -> None:
    assert "make test" in read(".ci/run")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", read(page))
    assert all((ROOT / page).parent.joinpath(link).exists() for link in links), links


def test_explain_knows_every_page() -> None:
    shipped = {path.stem for path in ROOT.glob("fxpart/docs/*.md")}
    assert set(EXPLAINED) == shipped
    assert not set(RENAMED) & shipped and set(RENAMED.values()) <= shipped


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"(?m): (\w+)\.md$", read("mkdocs.yml")))
    assert listed == set(EXPLAINED) | {"index"}


def test_requests_of_users_have_links_and_evidence() -> None:
    """At least thirty threads, each once; what fxpart does is shown by files that exist."""
    rows = re.findall(r"(?m)^\| \[.+\]\((\S+)\) \| (\w+) \| (.+) \|$", read(REQUESTS))
    assert len(rows) >= 30 and len({link for link, _, _ in rows}) == len(rows)
    thread = r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+"
    for link, answer, text in rows:
        assert re.fullmatch(thread, link) and answer in ("yes", "partly", "no"), link
        files = re.findall(r"`((?:tests|examples)/[\w/]+\.py)`", text)
        assert all((ROOT / file).is_file() for file in files), files
        assert answer != "yes" or files or "](" in text, link


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_fxpart_draws(name: str) -> None:
    """``python tests/support/document_pictures.py`` draws them."""
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name]()


def test_every_picture_is_shown() -> None:
    shown = set(re.findall(r"images/(\w+)\.svg", "".join(map(read, PAGES))))
    assert {path.stem for path in FOLDER.glob("*.svg")} <= shown


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str) -> None:
    """``python tests/support/api_pages.py`` writes them."""
    assert read(f"fxpart/docs/{name}.md") == GENERATED[name]()
