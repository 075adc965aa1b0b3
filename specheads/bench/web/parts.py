"""What all sections of the HTML page are made of: its style, tables, shares as shades, text as it was typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from specheads import pictures

DEPTH_COLORS = (2, 5, 0, 3, 4, 1, 7)  # of a Look's colours, those of drafts at depth 1, 2, …, as in a terminal


def _variables(look: pictures.Look) -> str:
    parts = {"ink": look.ink, "soft": look.soft, "page": look.page, "rule": look.rule, "mark": look.color(0)}
    parts |= {f"depth{depth}": look.colors[i] for depth, i in enumerate(DEPTH_COLORS, start=1)}
    return ":root{" + "".join(f"--{name}:{color};" for name, color in parts.items()) + "}"


STYLE = (
    f"""
{_variables(pictures.LIGHT)}@media(prefers-color-scheme:dark){{{_variables(pictures.DARK)}}}
"""
    + """:root{color-scheme:light dark}
*{box-sizing:border-box}body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{margin-top:2.5rem;border-top:1px solid var(--rule);
padding-top:1rem;overflow-wrap:anywhere}h3{margin-bottom:.3rem}p.note{color:var(--soft);margin:.2rem 0}
.soft{color:var(--soft)}
.wide,pre{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
pre{background:color-mix(in srgb,var(--rule) 45%,transparent);padding:.7rem;
font-size:.85rem}svg{width:100%;max-width:38rem;height:auto;display:block;margin:.8rem 0}
pre.text{white-space:pre-wrap;overflow-wrap:anywhere}
.heat{background:color-mix(in srgb,var(--mark) calc(var(--share)*60%),transparent)}
"""
    + "".join(f".depth{depth}{{color:var(--depth{depth})}}" for depth in range(1, len(DEPTH_COLORS) + 1))
)


def heat(rows: Mapping[str, Sequence[float]], column: str) -> str:
    """Shares from 0 to 1 as a table whose cells are the darker the larger the share is; columns are `column` 1, 2 …"""
    longest = max((len(shares) for shares in rows.values()), default=0)
    if not longest:
        return ""
    head = "".join(f"<th>{escape(column)} {i + 1}</th>" for i in range(longest))
    body = []
    for name, shares in rows.items():
        cells = "".join(f'<td style="--share:{share:.2f}" class="heat">{share:.0%}</td>' for share in shares)
        body.append(f"<tr><th>{escape(name)}</th>{cells}{'<td>–</td>' * (longest - len(shares))}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(body)}</table></div>'


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
