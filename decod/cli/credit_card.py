"""The card that `decod credit --card` draws: one SVG file that needs no other.

Browsers show it in light or dark colours, as their user prefers, also as an image in a page.
"""

from collections.abc import Iterator
from html import escape

from decod.journal.credit import CreditRows, bytes_text, day_text, hours_text
from decod.texts import clean_text

_NAME_MAX_CHARACTERS = 28
_RUN_NAME_MAX_CHARACTERS = 40

_STYLE = """
.back { fill: #ffffff; stroke: #d0d7de }
.strong { fill: #1f2328 }
.faint { fill: #59636e }
.mark { fill: #0f766e }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117; stroke: #3d444d }
.strong { fill: #f0f6fc }
.faint { fill: #9198a1 }
.mark { fill: #2dd4bf }
}
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
"""


def card_of(rows: CreditRows) -> str:
    """Return the card as SVG.

    Args:
        rows: What was done, in one run at least. Names in it are cleaned and escaped.
    """
    total = rows.total
    newest = max(rows.runs.values(), key=lambda row: row.last_s)
    name = _text(newest.node_name, _NAME_MAX_CHARACTERS)
    since = day_text(rows.first_s)
    plural = "" if rows.num_runs == 1 else "s"
    down = bytes_text(total.received_bytes)
    told = f"{name} did {total}, {down} down, in {rows.num_runs} run{plural} since {since}."
    figures = (
        (f"{total.num_microbatches:,}", "microbatches"),
        (hours_text(total.device_s), "device hours"),
        (bytes_text(total.sent_bytes), "up"),
        (down, "down"),
    )
    latest = _text(newest.run_name, _RUN_NAME_MAX_CHARACTERS)
    foot = f"{rows.num_runs} run{plural} since {since}; latest: {latest}"
    return "\n".join(
        (
            '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="210"'
            ' viewBox="0 0 560 210" role="img" aria-labelledby="title desc">',
            f'<title id="title">What {name} has done for decod</title>',
            f'<desc id="desc">{told} Counted by the host itself.</desc>',
            f"<style>{_STYLE}</style>",
            '<rect class="back" x="0.5" y="0.5" width="559" height="209" rx="12"/>',
            '<rect class="mark" x="28" y="30" width="6" height="38" rx="3"/>',
            f'<text class="strong" x="46" y="48" font-size="22" font-weight="600">{name}</text>',
            '<text class="faint" x="46" y="67" font-size="13">trains language models with others'
            " on decod</text>",
            *_columns(figures),
            f'<text class="faint" x="28" y="184" font-size="13">{foot}</text>',
            "</svg>",
            "",
        )
    )


def _columns(figures: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Yield each figure above its name. The first may be the longest."""
    for x, (figure, name) in zip((28, 210, 350, 455), figures, strict=True):
        yield (
            f'<text class="strong" x="{x}" y="124" font-size="24" font-weight="600">'
            f"{escape(figure)}</text>"
        )
        yield f'<text class="faint" x="{x}" y="146" font-size="13">{name}</text>'


def _text(value: str, limit: int) -> str:
    return escape(clean_text(value, limit=limit))
