"""The live screen of hmon, with textual: keys, filter, command line and pages.

A thread asks the controller (`reading`), and another one follows a job's output (`output`); both only send messages. Rules: a
key never waits for the controller; only visible rows are drawn; a command that changes something waits for Enter; text of
users is never markup. Colors are the terminal's own, or none with NO_COLOR.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.app import App, ComposeResult
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from hpcsched import client
from hpcsched.errors import HpcschedError, RequestError
from hpcsched.listing.text import clean
from hpcsched.tui.actions import ACTIONS, ON_TERMINAL, RunningCommand, command_of, run_on_terminal, words_of
from hpcsched.tui.lines import Line
from hpcsched.tui.output import LogFeed, OutputLines
from hpcsched.tui.reading import Asked, ClusterReader, ClusterScreen
from hpcsched.tui.views import (
    PARTS,
    SCREENS,
    Row,
    View,
    filtered,
    headline,
    job_rows,
    node_rows,
    row_line,
    tabs,
    text_row,
    view_of,
)

MOST_LOAD = 0.1  # the part of the time in which the controller is asked
SIDE_COLUMNS = 20
HINT = " enter details  l log  w why  c cancel  space mark  : command  ? help  q quit"


@lru_cache(maxsize=256)
def style_of(name: str) -> Style:
    """Return the style of a part of a line."""
    return Style.parse(name) if name else Style.null()


def strip_of(line: Line, width: int, side: int = 0, more: str = "") -> Strip:
    """Return a line as textual draws it, from column `side` on. `more`: a style for all of it."""
    strip = Strip([Segment(text, style_of(name)) for text, name in line if text])
    strip = strip.crop(side, side + width).extend_cell_length(width)
    return strip.apply_style(style_of(more)) if more else strip


# ----- messages of threads


class Looked(Message):
    """The cluster was asked."""

    def __init__(self, screen: ClusterScreen, job: str | None) -> None:
        super().__init__()
        self.screen, self.job = screen, job


class Written(Message):
    """A command or a job has written; `status` once it has ended."""

    def __init__(self, page: FrontPage, data: bytes, status: int | None) -> None:
        super().__init__()
        self.page, self.data, self.status = page, data, status


class Noted(Message):
    """What a page says of itself has changed."""

    def __init__(self, page: FrontPage, note: str) -> None:
        super().__init__()
        self.page, self.note = page, note


@dataclass(eq=False)
class FrontPage:
    """What is shown in front of the six screens. `row`: the job or node that it is about.

    `kind`: "job" and "node" are made again with each look; "output" has the text of a command or job.
    """

    kind: str
    title: str
    row: Row | None = None
    output: OutputLines = field(default_factory=OutputLines)
    feed: LogFeed | RunningCommand | None = None
    note: str = ""

    def close(self) -> None:
        """End what writes to the page."""
        if self.feed is not None:
            self.feed.stop()


# ----- widgets


class FixedLines(Widget):
    """Lines that do not scroll."""

    lines: Sequence[Line] = ()

    def show(self, *lines: Line) -> None:
        """Show these lines, if they have changed."""
        if lines != self.lines:
            self.lines = lines
            self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the widget."""
        return strip_of(self.lines[y] if y < len(self.lines) else [], self.size.width)


class RowList(Widget):
    """Rows of which those that fit are drawn, with a cursor if keys act on any of them."""

    can_focus = True

    def __init__(self, pressed: Callable[[events.Key], Awaitable[None]]) -> None:
        super().__init__()
        self._pressed = pressed
        self.view = View([], [])
        self.marked: set[tuple[str, str]] = set()
        self.at, self.first, self.side = 0, 0, 0
        self.has_cursor = False

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.view.rows[self.at] if self.has_cursor else None

    @property
    def is_at_end(self) -> bool:
        """Whether the last row is visible."""
        return self.first + self.size.height >= len(self.view.rows)

    def show(self, view: View, *, at_end: bool = False) -> None:
        """Show other rows; the cursor stays on its row if that is still there."""
        kept = self.current
        self.view = view
        self.has_cursor = any(row.kind != "text" for row in view.rows)
        if kept is not None and self.has_cursor:
            self.at = view.place_of(kept, self.at)
        self.at = max(0, min(self.at, len(view.rows) - 1))
        if self.has_cursor:
            self._settle(1)
        if at_end:
            self.first = len(view.rows)
        self._scroll()

    def _settle(self, step: int) -> None:
        """Move the cursor from a row of text to the next row that keys act on."""
        rows = self.view.rows
        for way in (step, -step):
            at = self.at
            while 0 <= at < len(rows) and rows[at].kind == "text":
                at += way
            if 0 <= at < len(rows):
                self.at = at
                return

    def _scroll(self) -> None:
        height, count = max(1, self.size.height), len(self.view.rows)
        if self.has_cursor:
            above = self.at
            while above > 0 and self.view.rows[above - 1].kind == "text" and self.at - above < 2:
                above -= 1  # a heading stays visible
            self.first = max(self.at - height + 1, min(self.first, above))
        self.first = max(0, min(self.first, count - height))
        self.refresh()

    def move(self, rows: int) -> None:
        """Move the cursor, or without one the text."""
        if self.has_cursor:
            self.at = max(0, min(self.at + rows, len(self.view.rows) - 1))
            self._settle(1 if rows > 0 else -1)
        else:
            self.first += rows
        self._scroll()

    def move_aside(self, columns: int) -> None:
        """Show columns further to the right or left."""
        self.side = max(0, self.side + columns)
        self.refresh()

    def to_start(self) -> None:
        """Show another list from its start."""
        self.at, self.first, self.side, self.has_cursor = 0, 0, 0, False

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the widget."""
        at, width = self.first + y, self.size.width
        if at >= len(self.view.rows):
            return strip_of([], width)
        row = self.view.rows[at]
        if row.kind == "text":
            return strip_of(row.value, width, self.side)
        is_marked = (row.kind, row.key) in self.marked
        try:
            drawn = row_line(self.view, row, width - 2)
        except Exception as error:
            drawn = [(_unreadable(error), "red")]
        line = [("* " if is_marked else "  ", "bold magenta"), *drawn]
        return strip_of(line, width, 0, "reverse" if self.has_cursor and at == self.at else "")

    async def on_key(self, event: events.Key) -> None:
        """Pass a key on."""
        await self._pressed(event)

    def on_mouse_scroll_down(self) -> None:
        """Scroll by the wheel."""
        self.move(3)

    def on_mouse_scroll_up(self) -> None:
        """Scroll by the wheel."""
        self.move(-3)

    def on_click(self, event: events.Click) -> None:
        """Select the row that was clicked."""
        at = self.first + event.y
        if self.has_cursor and at < len(self.view.rows):
            self.move(at - self.at)

    def on_resize(self) -> None:
        """Keep the cursor visible."""
        self._scroll()


# ----- the application


class MonitorApp(App[int]):
    """hmon. `job`: the id of the job that is shown first."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [("ctrl+c", "quit", "Quit")]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Screen > * { background: ansi_default; color: ansi_default; }
    #top { height: 3; }
    #message, #hint { height: 1; }
    RowList { height: 1fr; }
    Input, Input:focus { height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; }
    Input { display: none; }
    """

    def __init__(self, interval_s: float, job: str = "") -> None:
        super().__init__(ansi_color=True)
        self._interval_s = interval_s
        self._seen = ClusterScreen()
        self._made: tuple[ClusterScreen | None, tuple[str, int], View] = (None, ("", 0), View([], []))
        self._job_seen: str | None = None
        self._screen_name = SCREENS[0]
        self._folded, self._ended = True, False
        self._words_of: dict[str, str] = {}
        self._message: Line = []
        self._prompt = ""  # "filter", "command" or "action"
        self._pages: list[FrontPage] = []
        self._wake, self._stopped = threading.Event(), threading.Event()
        if job:
            self._pages.append(FrontPage("job", f"job {job}", Row("job", job, job, {})))

    def compose(self) -> ComposeResult:
        """Make the widgets: three lines, the rows, two lines."""
        self._top, self._rows = FixedLines(id="top"), RowList(self._pressed)
        self._line, self._hint, self._input = (
            FixedLines(id="message"),
            FixedLines(id="hint"),
            Input(select_on_focus=False),
        )
        yield from (self._top, self._rows, self._line, self._hint, self._input)

    def on_mount(self) -> None:
        """Begin to ask the controller."""
        self._rows.focus()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(number, partial(self.exit, return_code=128 + number))
        threading.Thread(target=self._look_on, daemon=True).start()
        self._show()

    def on_unmount(self) -> None:
        """End the threads and what they read."""
        self._stopped.set()
        self._wake.set()
        for page in self._pages:
            page.close()

    def _look_on(self) -> None:
        """Ask the controller again and again; a thread of its own."""
        reader = ClusterReader()
        while not self._stopped.is_set():
            self._wake.clear()
            began_s = time.monotonic()
            job, asked = self._wanted()
            try:
                screen = reader.look(job, asked)
            except HpcschedError as error:
                screen = ClusterScreen(trouble=str(error))
            except Exception as error:
                screen = ClusterScreen(trouble=_unreadable(error))
            took_s = time.monotonic() - began_s
            self._post(Looked(screen, job))
            self._wake.wait(max(self._interval_s, took_s / MOST_LOAD))

    def _wanted(self) -> tuple[str | None, Asked]:
        page = next(iter(self._pages[-1:]), None)  # another thread may close it meanwhile
        parts = PARTS[self._screen_name]
        if page is not None and page.kind == "node":
            parts |= {"jobs"}
        chosen = page.row.key if page is not None and page.kind == "job" and page.row is not None else None
        return chosen, Asked(parts=parts, has_ended=self._ended, is_folded=self._folded)

    @on(Looked)
    def _looked(self, message: Looked) -> None:
        screen = message.screen
        try:
            self._view(screen), headline(screen)
        except Exception as error:
            screen = ClusterScreen(trouble=_unreadable(error))
        if screen.controller is None and not screen.nodes:  # an error: what was seen last stays
            screen = replace(self._seen, controller=None, trouble=screen.trouble)
        self._seen, self._job_seen = screen, message.job
        self._show()

    # ----- what is shown

    def _view(self, screen: ClusterScreen) -> View:
        """Return the chosen screen.

        It is made once for each look at the cluster: keys are more frequent.
        """
        place = (self._screen_name, self.size.width)
        seen, made_at, view = self._made
        if seen is not screen or made_at != place:
            view = view_of(self._screen_name, screen, self.size.width)
            self._made = (screen, place, view)
        return view

    def _show(self) -> None:
        """Show the chosen screen or page with what is known."""
        width = self.size.width
        page = self._pages[-1] if self._pages else None
        words = self._words_of.get(self._place(), "")
        view = self._view(self._seen) if page is None else self._page_view(page, width)
        shown = filtered(view, words)
        note = f"/{words} {len(shown.rows)} of {len(view.rows)}" if words else ""
        second = tabs(self._screen_name, width, note) if page is None else [(" " + clean(page.title), "reverse")]
        header = view.header if page is None else [(" " + clean(note or page.note), "yellow")]
        self._top.show(headline(self._seen), second, header)
        self._rows.show(shown, at_end=page is not None and page.kind == "output" and self._rows.is_at_end)
        self._show_message()
        self._hint.show([(HINT, "dim")] if page is None else [(" escape back  / filter  arrows scroll  ? help", "dim")])

    def _page_view(self, page: FrontPage, width: int) -> View:
        if page.kind == "output":
            return View([], [text_row((line, "")) for line in page.output.all()])
        if page.row is None:
            return View([], _help_rows())
        if page.kind == "node":
            return View([], node_rows(page.row.key, self._seen, width))
        if self._job_seen != page.row.key:
            return View([], [text_row(("asking ...", "dim"))])
        return View([], job_rows(self._seen, width))

    def _place(self) -> str:
        return f"page {len(self._pages)}" if self._pages else self._screen_name

    def _say(self, text: str, style: str = "") -> None:
        self._message = [(" " + clean(text), style)]
        self._show_message()

    def _show_message(self) -> None:
        """Show why the controller does not answer, or else the last message."""
        trouble = self._seen.trouble if self._seen.controller is None and not self._prompt else ""
        self._line.show([(" " + clean(trouble), "red")] if trouble else self._message)

    def _open(self, page: FrontPage) -> None:
        self._pages.append(page)
        self._turn()

    def _turn(self) -> None:
        """Show another screen or page from its start, and ask for what it needs."""
        self._words_of.pop(f"page {len(self._pages)}", None)
        self._rows.to_start()
        self._wake.set()
        self._show()

    # ----- keys

    async def on_key(self, event: events.Key) -> None:
        """Take a key that neither the rows nor the line have taken."""
        if self._prompt and event.key == "escape":
            self._end_prompt(cancelled=True)
        elif self.focused is None:  # a click beside the rows
            await self._pressed(event)

    async def _pressed(self, event: events.Key) -> None:
        """Do what a key of the rows stands for, unless a line is being typed."""
        if self._prompt:
            await self._typed_ahead(event)
            return
        key = event.character if event.is_printable and event.character else event.key
        try:
            if self._do(key):
                event.stop()
        except RequestError as error:
            self._say(str(error), "red")

    async def _typed_ahead(self, event: events.Key) -> None:
        """Put a key into the line that was pressed before the line had the focus."""
        event.stop()
        if event.key == "escape":
            self._end_prompt(cancelled=True)
        elif event.key == "enter":
            await self._input.action_submit()
        elif event.key == "backspace":
            self._input.action_delete_left()
        elif event.is_printable and event.character:
            self._input.insert_text_at_cursor(event.character)

    def _do(self, key: str) -> bool:
        """Do what `key` stands for, and return whether it stands for anything."""
        page = max(1, self._rows.size.height - 1)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}
        moves |= {"home": -(1 << 40), "g": -(1 << 40), "end": 1 << 40, "G": 1 << 40}
        keys: dict[str, Callable[[], None]] = {
            "q": self._back, "escape": self._back, "enter": self._details, " ": self._mark, "y": self._copy,
            "l": partial(self._follow, "out"), "e": partial(self._follow, "err"), "s": self._script,
            "a": partial(self._toggle, "_folded", "arrays are folded", "each task has a row"),
            "f": partial(self._toggle, "_ended", "ended jobs are shown", "ended jobs are not shown"),
            "/": partial(self._ask, "filter", self._words_of.get(self._place(), "")),
            ":": partial(self._ask, "command", ""),
            "?": partial(self._open, FrontPage("help", "help")),
            "left": partial(self._aside, -1), "right": partial(self._aside, 1),
        }  # fmt: skip
        if key in moves:
            self._rows.move(moves[key])
        elif key in keys:
            keys[key]()
        elif key.isdigit() and 1 <= int(key) <= len(SCREENS):
            self._go(SCREENS[int(key) - 1])
        elif key in ACTIONS:
            self._act(key)
        else:
            return False
        return True

    def _go(self, name: str) -> None:
        while self._pages:
            self._pages.pop().close()
        self._screen_name = name
        self._rows.marked.clear()
        self._turn()

    def _back(self) -> None:
        if self._pages:
            self._pages.pop().close()
            self._turn()
        elif self._words_of.pop(self._screen_name, ""):
            self._show()
        else:
            self.exit(0)

    def _aside(self, step: int) -> None:
        if self._pages:
            self._rows.move_aside(step * SIDE_COLUMNS)
        else:
            self._go(SCREENS[(SCREENS.index(self._screen_name) + step) % len(SCREENS)])

    def _toggle(self, name: str, yes: str, no: str) -> None:
        setattr(self, name, not getattr(self, name))
        self._say(yes if getattr(self, name) else no)
        self._wake.set()

    def _selected(self) -> list[Row]:
        """Return the marked rows, or else the current one, or what the page is about."""
        rows = self._rows.view.rows
        marked = [row for row in rows if (row.kind, row.key) in self._rows.marked] if self._rows.marked else []
        found = marked or ([self._rows.current] if self._rows.current is not None else [])
        page = self._pages[-1] if self._pages else None
        return [*found, page.row] if page is not None and page.row is not None else found

    def _row(self, kind: str) -> Row:
        row = next((row for row in self._selected() if row.kind == kind), None)
        if row is None:
            raise RequestError(f"cannot do that here: select a {kind}")
        return row

    def _details(self) -> None:
        row = self._rows.current
        if row is not None:
            self._open(FrontPage(row.kind, f"{row.kind} {row.name}", row))

    def _mark(self) -> None:
        row = self._rows.current
        if row is not None:
            self._rows.marked ^= {(row.kind, row.key)}
            self._rows.move(1)

    def _copy(self) -> None:
        names = " ".join(row.name for row in self._selected())
        self.copy_to_clipboard(names)
        self._say(f"copied: {names}")

    # ----- pages of output

    def _follow(self, stream: str) -> None:
        row = self._row("job")
        page = FrontPage("output", f"{'output' if stream == 'out' else 'errors'} of job {row.name}", row)
        page.feed = LogFeed(row.key, stream, self._writer(page), lambda note: self._post(Noted(page, note)))
        self._open(page)

    def _script(self) -> None:
        row = self._row("job")
        page = FrontPage("output", f"script of job {row.name}", row)

        def read() -> None:
            try:
                job = client.call("GET", client.job_path(row.key))["jobs"][0]
                text = str(job.get("script") or "the script is shown to the job's owner and to admins\n")
            except HpcschedError as error:
                text = str(error)
            self._post(Written(page, text.encode(), 0))

        threading.Thread(target=read, daemon=True).start()
        self._open(page)

    def _post(self, message: Message) -> None:
        if not self._stopped.is_set():
            self.post_message(message)

    def _writer(self, page: FrontPage) -> Callable[[bytes, int | None], None]:
        return lambda data, status: self._post(Written(page, data, status))

    @on(Written)
    def _written(self, message: Written) -> None:
        page = message.page
        page.output.add(message.data)
        if message.status is not None and page.kind == "action":
            self._acted(page, message.status)
        elif message.status is not None and isinstance(page.feed, RunningCommand):
            page.note = f"ended with exit status {message.status}"
        elif message.status == 0 and isinstance(page.feed, LogFeed):
            page.note = "the job has ended"
        if self._pages and self._pages[-1] is page:
            self._show()

    @on(Noted)
    def _noted(self, message: Noted) -> None:
        message.page.note = clean(message.note)
        self._show()

    # ----- commands

    def _act(self, key: str) -> None:
        action = ACTIONS[key]
        words = command_of(action, self._selected())
        text = " ".join(map(_quoted, words))
        if action.asks:
            self._ask("action", text)
        else:
            self._run_in_page(words, text)

    def _run_in_page(self, words: list[str], text: str) -> None:
        page = FrontPage("output", f"$ {text}", next(iter(self._selected()), None))
        page.feed = RunningCommand(words, self.size.width, self._writer(page))
        self._say(f"$ {text}")
        self._open(page)

    def _run(self, text: str) -> None:
        """Run a command that changes something: what it says becomes the message."""
        words = words_of(text, [row.name for row in self._selected()])
        page = FrontPage("action", f"$ {text}", next(iter(self._selected()), None))
        page.feed = RunningCommand(words, self.size.width, self._writer(page))
        self._say(f"$ {text} ...")

    def _acted(self, page: FrontPage, status: int) -> None:
        lines = [line for line in page.output.all() if line.strip()]
        self._say(
            f"$ {page.title}  {lines[-1] if lines else 'done' if status == 0 else ''}", "red" if status else "green"
        )
        if len(lines) > 1 and status:
            page.kind = "output"
            self._open(page)
        if not status:
            self._rows.marked.clear()
        self._wake.set()

    def _run_line(self, text: str) -> None:
        """Run what was typed: on this terminal if it needs one, else in a page."""
        names = [row.name for row in self._selected()]
        words = words_of(text, names)
        if words[0] not in ON_TERMINAL:
            self._run_in_page(words, text)
            return
        with self.suspend():
            status = run_on_terminal(words)
        self._say(f"$ {text}  ended with exit status {status}", "red" if status else "")
        self.refresh()

    # ----- the line that is typed

    def _ask(self, kind: str, text: str) -> None:
        self._prompt = kind
        names = ", ".join(row.name for row in self._selected())
        explained = {
            "filter": "filter: rows with all of these words; escape clears it",
            "command": f"an h-command; % is {names or 'what is selected'}; enter runs it, escape does not",
            "action": "enter runs this command, escape does not",
        }
        self._say(explained[kind], "bold yellow")
        self._hint.display, self._input.display = False, True
        self._input.value = text
        self._input.cursor_position = len(text)
        self._input.focus()

    def _end_prompt(self, *, cancelled: bool = False) -> None:
        kind, self._prompt = self._prompt, ""
        self._hint.display, self._input.display = True, False
        self._rows.focus()
        self._say("nothing was run" if cancelled and kind != "filter" else "")
        if kind == "filter" and cancelled:
            self._words_of.pop(self._place(), None)
            self._show()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self._prompt == "filter":
            self._words_of[self._place()] = event.value
            self._show()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        kind, text = self._prompt, event.value.strip()
        self._end_prompt()
        try:
            if kind == "command" and text:
                self._run_line(text)
            elif kind == "action" and text:
                self._run(text)
        except RequestError as error:
            self._say(str(error), "red")


def _unreadable(error: Exception) -> str:
    """Return what is shown in place of an answer of another shape than ours."""
    return clean(f"cannot read the controller's answer: {type(error).__name__}: {error}")


def _quoted(word: str) -> str:
    """Return a word of a command as it is typed there, brackets as they are."""
    return word if word.isprintable() and not set(word) & set(" \"'\\$`") else "'" + word.replace("'", "'\\''") + "'"


def _help_rows() -> list[Row]:
    acts = (
        (key, f"{one.help}: {' '.join((*one.before, one.kind.upper(), *one.after))}") for key, one in ACTIONS.items()
    )
    lines = [
        ("1-6, left, right", "the screens"),
        ("up, down, j, k", "move; also page up, page down, g, G, the wheel and a click"),
        ("enter", "details of a job or node"),
        ("l, e", "follow the output of a job, or its standard error"),
        ("s", "the script of a job"),
        *acts,
        ("space", "mark several rows for the keys that change something, and for %"),
        ("a", "fold or unfold arrays (screen 2)"),
        ("f", "show or hide ended jobs (screen 2)"),
        ("y", "copy the job's id or the node's name"),
        ("/", "filter rows, also of a log"),
        (":", "run an h-command; % stands for what is marked"),
        ("escape, q", "back; on a screen, q quits"),
    ]
    return [text_row((f"  {keys:<17} ", "bold"), (text, "")) for keys, text in lines]
