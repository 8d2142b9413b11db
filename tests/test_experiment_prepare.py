"""python -m experiments.prepare."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.prepare import main
from msb_jax.data.format import load_log
from tests.logs import HEADER, random_tagged, write_tagged, yahoo_line

DELICIOUS = "user_taggedbookmarks-timestamps.dat"


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(list(flags))
    out, err = capsys.readouterr()
    return code, out, err


def test_prepare__demo_and_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "demo.npz"
    asked = ("--dataset=demo", f"--out={out}", "--num_arms=12")
    code, text, err = run(capsys, *asked)
    first = out.read_bytes()
    assert code == 0 and not err and hashlib.sha256(first).hexdigest() in text
    assert load_log(out).item_vectors.shape == (12, 10)
    assert run(capsys, *asked)[::2] == (
        2,
        f"error: --out={out} exists; replace it with --force.\n",
    )
    assert run(capsys, *asked, "--force")[0] == 0 and out.read_bytes() == first


def test_prepare__delicious(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_tagged(tmp_path, DELICIOUS)
    with open(tmp_path / DELICIOUS, "a") as file:
        file.write("\nbroken\n")
    out = tmp_path / "log.npz"
    code, text, err = run(
        capsys,
        "--dataset=delicious",
        f"--raw={tmp_path}",
        f"--out={out}",
        "--num_arms=6",
        "--num_items=25",
        "--user=4",
    )
    assert code == 0 and not err
    for part in (
        "401 rows read",
        "1 blank lines",
        "1 lines with a wrong number of columns, dropped",
        hashlib.sha256((tmp_path / DELICIOUS).read_bytes()).hexdigest(),
        "1 user, number 4",
    ):
        assert part in text
    log = load_log(out)
    assert log.user_ids.tolist() == [4] and log.item_vectors.shape == (6, 10)


def test_prepare__yahoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool: dict[int, list[float] | None] = {
        i: [0.1 * i, 0.2, 0.1, 0.1, 0.1] for i in range(1, 6)
    }
    lines = [yahoo_line(t, 1 + t % 5, t % 2, pool) for t in range(40)]
    (tmp_path / "ydata-fp-td-clicks-v1_0.20090501").write_text("".join(lines))
    out = tmp_path / "log.npz"
    asked = ("--dataset=yahoo", f"--raw={tmp_path}", f"--out={out}")
    code, _, err = run(capsys, *asked)
    assert code == 2 and "5 articles with whole features for 20 arms" in err
    assert run(capsys, *asked, "--num_arms=5")[0] == 0
    clicked = [t % 5 for t in range(40) if t % 2]
    assert load_log(out).clicks_of().tolist() == clicked


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "Choose a log"),
        (("--dataset=netflix",), "should be one of"),
        (("--dataset=demo",), "Name the file"),
        (("--dataset=demo", "--out=log.txt"), "Name the file"),
        (("--dataset=demo", "--out=x.npz", "--user=3"), "has no users"),
        (("--dataset=demo", "--out=x.npz", "--num_arms=0"), "num_arms must be"),
        (("--dataset=demo", "--out=x.npz", "--seed=-1"), "seed must be at least 0"),
        (("--dataset=demo", "--out=x.npz", "--num_arms=x"), "num_arms"),
        (("--dataset=lastfm", "--out=x.npz"), "hetrec2011-lastfm-2k.zip"),
        (("--dataset=lastfm", "--out=x.npz", "--raw=none"), "no folder none"),
        (("--dataset=yahoo", "--out=x.npz", "--raw=none"), "Webscope"),
        (("--dataset=movielens", "--out=x.npz", "--raw=."), "it holds the lastfm log"),
        (("--dataset=lastfm", "--out=x.npz", "--raw=."), "has a header but no rows"),
        (("--dataset=demo", "--out=folder.npz"), "is a folder"),
        (("--dataset=demo", "--out=tags.dat/x.npz"), "cannot be used"),
        (("--dataset=demo", "--out=x.npz", "more"), "Unexpected argument"),
    ],
)
def test_prepare__one_sentence_for_what_cannot_be_done(
    flags: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tagged(tmp_path, HEADER)
    (tmp_path / "folder.npz").mkdir()
    code, _, err = run(capsys, *flags)
    assert code == 2 and sentence in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "x.npz").exists()


def test_prepare__help_without_jax() -> None:
    program = (
        "import sys; from experiments.prepare import main; code = main(['--help']); "
        "sys.exit(code or 'jax' in sys.modules or 'sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0 and b"--num_items" in done.stdout
