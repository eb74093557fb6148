"""The diagrams of the pages, as SVG text; `generate.py` writes them into ``images/``.

Each is a function that places boxes, words and arrows on a `Picture`. Nothing is measured: widths
are chosen so that the words fit in any common sans-serif font.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

INK, FAINT, PAPER = "#1f2937", "#6b7280", "#ffffff"
DASK, CHANNEL, DEVICE, PLAIN = "#2563eb", "#15803d", "#b45309", "#6b7280"
"""By what carries it: Dask's connection, the channel, the memory, Dask without the plugin."""
FONT = "font-family='Helvetica, Arial, sans-serif'"
LINE = 17


class Picture:
    """An SVG that grows by what is put on it, on a white card."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, *, fill: str = PAPER, stroke: str = INK
    ) -> None:
        """A rectangle with round corners."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' "
            f"stroke='{stroke}' stroke-width='1.3'/>"
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = INK,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Lines of text; ``y`` is the first one's baseline."""
        weight = " font-weight='bold'" if bold else ""
        for number, line in enumerate(text.split("\n")):
            self._parts.append(
                f"<text x='{x}' y='{y + number * LINE}' font-size='{size}' fill='{colour}' "
                f"text-anchor='{anchor}'{weight}>{escape(line)}</text>"
            )

    def arrow(
        self,
        *points: tuple[float, float],
        colour: str = INK,
        both: bool = False,
        dashed: bool = False,
    ) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        mark = f"url(#head{colour[1:]})"
        start = f" marker-start='{mark}'" if both else ""
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.6'"
            f"{dash}{start} marker-end='{mark}'/>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A faint one without a head."""
        self._parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{FAINT}' stroke-width='1'/>"
        )

    def legend(self, x: float, y: float, *entries: tuple[str, str]) -> None:
        """What the colours mean, side by side."""
        for colour, text in entries:
            self.arrow((x, y - 4), (x + 26, y - 4), colour=colour)
            self.words(x + 34, y, text, size=12, colour=FAINT)
            x += 50 + 6.4 * len(text)

    def svg(self) -> str:
        """The whole file."""
        width, height = self._size
        heads = "".join(
            f"<marker id='head{c[1:]}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto-start-reverse'><path d='M0,0.5 L8,4 L0,7.5 z' "
            f"fill='{c}'/></marker>"
            for c in (INK, DASK, CHANNEL, DEVICE, PLAIN)
        )
        body = "\n".join(self._parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' {FONT}>\n"
            f"<title>{escape(self._title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>\n{body}\n</svg>\n"
        )


def node() -> str:
    """Two workers of one node, and what lies between them."""
    p = Picture(820, 420, "Two workers of one node: Dask's connection, the channel, shared memory")
    p.box(300, 16, 220, 40, fill="#eff6ff", stroke=DASK)
    p.words(410, 41, "scheduler and clients", anchor="middle")
    p.box(16, 92, 788, 284, fill="#f9fafb", stroke=FAINT)
    p.words(30, 114, "one node", colour=FAINT)
    for x, name, role in ((40, "worker A", "producer"), (560, "worker B", "consumer")):
        p.box(x, 128, 220, 122)
        p.words(x + 110, 150, f"{name}, here the {role}", anchor="middle", bold=True)
        p.words(
            x + 14, 174, "tasks, worker.data\nexporter: pins, leases\nimporter: mappings, arrays"
        )
        p.words(x + 14, 236, "GPUIPCPlugin", colour=FAINT)
    p.arrow((300, 46), (150, 46), (150, 128), colour=PLAIN, both=True)
    p.arrow((520, 46), (670, 46), (670, 128), colour=PLAIN, both=True)
    p.words(162, 84, "results as bytes", colour=PLAIN, size=12)
    p.arrow((260, 164), (560, 164), colour=DASK, both=True)
    p.words(410, 156, "get_data, descriptors, OK", colour=DASK, anchor="middle")
    p.arrow((260, 216), (560, 216), colour=CHANNEL, both=True)
    p.words(410, 208, "handles once, releases", colour=CHANNEL, anchor="middle")
    p.box(230, 292, 360, 66, fill="#fffbeb", stroke=DEVICE)
    p.words(410, 316, "memory: the GPU's, or shared pages of the host", anchor="middle")
    p.words(410, 340, "the chunk lies here, once", anchor="middle", colour=DEVICE)
    p.arrow((150, 250), (150, 325), (230, 325), colour=DEVICE)
    p.words(60, 346, "allocates, pins", colour=DEVICE, size=12)
    p.arrow((590, 325), (670, 325), (670, 250), colour=DEVICE)
    p.words(634, 346, "copies from it, or maps it", colour=DEVICE, size=12)
    p.legend(
        30,
        404,
        (DASK, "Dask's connection (tcp, tls, ws)"),
        (CHANNEL, "the channel, a local socket"),
        (DEVICE, "the bytes of the chunk"),
    )
    return p.svg()


Step = tuple[str, str, str] | tuple[str, str]
"""(">" or "<", colour, text): a message; ("c" or "p", text): what one side does by itself."""

STEPS: Sequence[Step] = (
    (">", DASK, "connect; handshake with the advertisement"),
    (">", DASK, "get_data(keys)"),
    ("p", "advertisement matches?\nno: plain Dask, counted in refused"),
    ("<", CHANNEL, "dial: Hello with the token (first time only)"),
    (">", CHANNEL, "Welcome"),
    ("p", "CUDA: wait until the arrays are finished\nopen a transfer; for each array: pin it"),
    ("<", CHANNEL, "Announce: handle of the allocation (once per peer)"),
    ("p", "lease OFFERED, descriptor written"),
    ("<", DASK, "answer with the descriptors"),
    ("c", "read what the channel holds"),
    ("c", "check the descriptor, find the mapping or open it"),
    ("c", "make the array"),
    (">", DASK, "OK (acknowledge)"),
    ("p", "leases GRANTED"),
    ("c", "tasks read and write"),
    ("c", "the last reference dies, or the copy is made"),
    ("c", "CUDA: wait until the device is done with it"),
    (">", CHANNEL, "Release"),
    ("p", "lease over; with the last one the pin"),
)


def transfer() -> str:
    """One transfer, from the connection to the release."""
    left, right = 290, 620
    height = 120 + sum(34 if len(step) == 3 else 12 + LINE * _lines(step) for step in STEPS)
    p = Picture(890, height, "One transfer, in the order of its messages")
    for x, name in ((left, "consumer"), (right, "producer")):
        p.box(x - 60, 14, 120, 32, fill="#eff6ff", stroke=DASK)
        p.words(x, 35, name, anchor="middle", bold=True)
        p.line(x, 46, x, height - 44)
    y = 76
    for step in STEPS:
        y += _step(p, step, y, left, right)
    p.legend(
        left - 60,
        height - 16,
        (DASK, "Dask's connection"),
        (CHANNEL, "the channel"),
    )
    return p.svg()


def _lines(step: Step) -> int:
    return step[-1].count("\n") + 1


def _step(p: Picture, step: Step, y: float, left: float, right: float) -> float:
    if len(step) == 2:
        anchor, x = ("end", left - 12) if step[0] == "c" else ("start", right + 12)
        p.words(x, y - 4, step[1], size=12, anchor=anchor)
        return 12 + LINE * _lines(step)
    way, colour, text = step
    ends = [(left + 3, y), (right - 3, y)]
    p.arrow(*(ends if way == ">" else reversed(ends)), colour=colour)
    p.words((left + right) / 2, y - 6, text, size=12, colour=colour, anchor="middle")
    return 34


QUESTIONS = (
    (
        "Does the request come from a worker of this\nnode, user and cluster that has the plugin?",
        "bytes",
    ),
    ("Is the array large enough, of a known type,\nand within the budget?", "bytes"),
    ("Does it lie in host memory (NumPy)?", "share, copy-on-write"),
    ("Is the consumer known to open handles of\nthis GPU? (same GPU, or self-test passed)", "host"),
    ("Has its memory a handle? (cudaMalloc's has)", "stage"),
    ('Is transfer="share" set?', "copy"),
)
LEAVE_ON_YES = 2
"""The question whose yes, not no, leads aside."""
RESULTS = {
    "bytes": "Dask's own way",
    "share, copy-on-write": "one copy into shared pages, mapped by the consumer",
    "host": "by way of pinned host memory",
    "stage": "one device copy into a block with a handle, then as copy",
    "copy": "one device copy into the consumer's pool",
}


def ladder() -> str:
    """Which rung a chunk goes by."""
    step, x, w = 78, 24, 330
    p = Picture(840, 70 + step * (len(QUESTIONS) + 1) - 20, "Which rung a chunk takes")
    for number, (question, rung) in enumerate(QUESTIONS):
        y = 20 + number * step
        p.box(x, y, w, 52, fill="#f9fafb")
        first = y + (22 if "\n" in question else 31)
        p.words(x + 12, first, question)
        yes = number == LEAVE_ON_YES
        p.arrow((x + w, y + 26), (x + w + 70, y + 26))
        p.words(x + w + 34, y + 19, "yes" if yes else "no", size=12, anchor="middle")
        _rung(p, x + w + 72, y, rung)
        p.arrow((x + w / 2, y + 52), (x + w / 2, y + step))
        p.words(x + w / 2 + 8, y + 69, "no" if yes else "yes", size=12)
    y = 20 + len(QUESTIONS) * step
    p.box(x, y, w, 52, fill="#fffbeb", stroke=DEVICE)
    p.words(x + 12, y + 22, "share", bold=True)
    p.words(x + 12, y + 40, "nothing moves: the producer's memory, an alias", size=12)
    p.words(
        x + w + 72,
        y + 22,
        "What fails on its way down the ladder goes by the\nnext rung; the reason is counted.",
        size=12,
        colour=FAINT,
    )
    return p.svg()


def _rung(p: Picture, x: float, y: float, rung: str) -> None:
    plain = rung == "bytes"
    p.box(x, y, 390, 52, fill="#f3f4f6" if plain else "#fffbeb", stroke=PLAIN if plain else DEVICE)
    p.words(x + 12, y + 22, rung, bold=True)
    p.words(x + 12, y + 40, RESULTS[rung], size=12)


def lease() -> str:
    """The life of a lease."""
    p = Picture(840, 300, "The life of a lease")
    for x, name, text in (
        (24, "offered", "the descriptor is written;\nthe source is pinned"),
        (320, "granted", "the consumer said OK, and\nmay read as long as it likes"),
        (616, "over", "with the last lease on it\nthe pin ends"),
    ):
        p.box(x, 96, 200, 78, fill="#f9fafb" if name == "over" else "#eff6ff")
        p.words(x + 100, 118, name, bold=True, anchor="middle")
        p.words(x + 100, 140, text, size=12, anchor="middle")
    p.arrow((224, 135), (320, 135), colour=DASK)
    p.words(272, 127, "OK", colour=DASK, anchor="middle", size=12)
    p.arrow((520, 135), (616, 135), colour=CHANNEL)
    p.words(568, 127, "Release, nack", colour=CHANNEL, anchor="middle", size=12)
    p.arrow((420, 96), (420, 52), (716, 52), (716, 96))
    p.words(
        568, 44, "the consumer's process dies (its pidfd), in any state", anchor="middle", size=12
    )
    p.box(24, 226, 300, 52, stroke=FAINT)
    p.words(
        36,
        247,
        "no OK: the consumer is asked which leases\nit has, and may open no others",
        size=12,
    )
    p.arrow((124, 174), (124, 226), dashed=True)
    p.arrow((324, 240), (420, 240), (420, 174), colour=CHANNEL)
    p.words(338, 232, "it has it", size=12, colour=CHANNEL)
    p.arrow((324, 266), (716, 266), (716, 174), colour=CHANNEL)
    p.words(560, 258, "it has it not", size=12, colour=CHANNEL)
    p.words(610, 292, "Nothing ends by a clock.", size=12, colour=FAINT)
    return p.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "node": node,
    "transfer": transfer,
    "ladder": ladder,
    "lease": lease,
}
