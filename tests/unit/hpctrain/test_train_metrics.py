"""The file of lines: on a share that does not take them, and after a writer that was killed."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from hpctrain import metrics
from hpctrain.metrics import LINE_END, RETRY_S, MetricsFile, read_metrics


class Share:
    """Writes that fail while `error` is set, after so many bytes more."""

    def __init__(self) -> None:
        self.error = 0
        self.room = 0
        self.now_s = 0.0

    def file(self) -> type[io.FileIO]:
        share = self

        class File(io.FileIO):
            def write(self, data: bytes) -> int:  # type: ignore[override]
                if not share.error:
                    return super().write(data)
                taken, share.room = min(share.room, len(data)), 0
                if not taken:
                    raise OSError(share.error, os.strerror(share.error))
                return super().write(bytes(data[:taken]))

        return File


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Share:
    made = Share()
    monkeypatch.setattr(metrics.io, "FileIO", made.file())
    return made


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EIO])
def test_lines_that_the_share_does_not_take_wait_and_follow_in_order(
    tmp_path: Path, share: Share, capsys: pytest.CaptureFixture[str], error: int
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path, lambda: share.now_s)
    file.write({"step": 1})
    share.error, share.room = error, 5  # half a line is taken
    for step in (2, 3):
        file.write({"step": step})
    assert steps(path) == [1]
    share.error = 0
    file.write({"step": 4})
    assert steps(path) == [1], "it is not asked for each line"
    share.now_s += RETRY_S
    file.write({"step": 5})
    assert steps(path) == [1, 2, 3, 4, 5]
    file.close()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(str(path))[0] for line in said] == ["metrics: cannot write ", "metrics: "], said
    assert os.strerror(error) in said[0]


def test_metrics_that_were_never_written_are_reported(
    tmp_path: Path, share: Share, capsys: pytest.CaptureFixture[str]
) -> None:
    share.error = errno.ENOSPC
    file = MetricsFile(tmp_path / "metrics.jsonl", lambda: share.now_s)
    for step in range(3):
        file.write({"step": step})
    file.close()
    assert "3 lines could not be written" in capsys.readouterr().out


def test_a_share_that_is_away_when_the_file_is_opened_gets_all_lines_later(tmp_path: Path) -> None:
    now_s = 0.0
    (tmp_path / "run").write_text("in the way")
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl", lambda: now_s)
    file.write({"step": 1})
    (tmp_path / "run").unlink()
    now_s += RETRY_S
    file.write({"step": 2})
    file.close()
    assert steps(tmp_path / "run" / "metrics.jsonl") == [1, 2]


def test_so_much_waits_and_no_more(tmp_path: Path, share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_BYTES", 50)
    share.error = errno.ENOSPC
    file = MetricsFile(tmp_path / "metrics.jsonl", lambda: share.now_s)
    for step in range(20):
        file.write({"step": step})
        share.now_s += RETRY_S
    share.error = 0
    file.close()
    last = steps(tmp_path / "metrics.jsonl")
    assert 0 < len(last) <= 50 // len(b'{"step":19}' + LINE_END)
    assert last == list(range(20 - len(last), 20)), "the oldest are given up, whole"


def test_half_a_line_of_a_killed_writer_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"st')
    file = MetricsFile(path)
    file.write({"step": 2})
    file.close()
    assert steps(path) == [1, 2]
