"""Draw docs/demo.svg: run `hpcsched demo` in a terminal of its own, and render one of its screens with rich.

    .venv/bin/python docs/tools/picture.py                      # plays the demo (three minutes), writes docs/demo.svg
    .venv/bin/python docs/tools/picture.py --keep frames.log    # keeps what the terminal received
    .venv/bin/python docs/tools/picture.py --from frames.log    # draws it again from there

It knows only that the demo draws whole screens from the terminal's home position, not how.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 108, 34
HOME = "\x1b[H"
END_OF_SCREEN = "\x1b[?1049l"
TARGET = Path(__file__).parents[1] / "demo.svg"

# rich's own template without its window and without fonts from a server.
SVG = """<svg class="rich-terminal" viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect fill="#101418" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g transform="translate(9, 9)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def play() -> str:
    """Run the demo in a pseudo-terminal and return what it wrote there. Raises CalledProcessError."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [Path(sys.executable).with_name("hpcsched"), "demo"]
    env = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "COLUMNS": str(COLUMNS),
        "LINES": str(LINES),
    }
    received = bytearray()
    with tempfile.TemporaryDirectory(prefix="hp") as directory:
        with subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, cwd=directory, env=env
        ) as demo:
            os.close(follower)
            try:
                while data := os.read(leader, 1 << 16):
                    received += data
            except OSError:  # EIO: the demo has closed its side
                pass
            os.close(leader)
        if demo.wait() != 0:
            sys.stderr.write(received.decode(errors="replace")[-4000:])
            raise subprocess.CalledProcessError(demo.returncode, command)
    return received.decode(errors="replace")


def screens(received: str) -> list[str]:
    """Return the whole screens among what the terminal received, in order."""
    parts = received.partition(END_OF_SCREEN)[0].split(HOME)[1:]
    plain = [re.sub(r"\x1b\[\??[0-9;]*[a-ln-zA-Z]", "", part).replace("\r", "") for part in parts]
    return [text for text in plain if text.count("\n") >= LINES - 2]


def draw(screen: str, target: Path) -> None:
    """Write a screen as SVG."""
    console = Console(record=True, width=COLUMNS + 2, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in screen.splitlines()[:LINES]:
        text = Text.from_ansi(line)
        text.truncate(COLUMNS)
        console.print(text, highlight=False)
    console.print()  # room for the frame's lower edge
    svg = console.export_svg(title="hpcsched demo", code_format=SVG, unique_id="demo")
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def main() -> None:
    """Play the demo, or read a recording of it, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what the terminal received to FILE")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="read it from FILE")
    parser.add_argument("--at", default="RUNNING", metavar="TEXT", help="draw the last screen with TEXT (%(default)s)")
    parser.add_argument(
        "--back", type=int, default=30, metavar="N", help="draw the screen N screens before that (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=TARGET, help="default: %(default)s")
    options = parser.parse_args()
    received = options.source.read_text() if options.source else play()
    if options.keep:
        options.keep.write_text(received)
    found = [screen for screen in screens(received) if options.at in re.sub(r"\x1b\[[0-9;]*m", "", screen)]
    if not found:
        sys.exit(f"picture: no screen of the demo has {options.at!r}")
    draw(found[max(0, len(found) - 1 - options.back)], options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB, the last of {len(found)} screens")


if __name__ == "__main__":
    main()
