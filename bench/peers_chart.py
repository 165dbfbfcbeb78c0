#!/usr/bin/env python3
"""A bar chart of peers.py's figures as SVG, made of nothing but text. By itself: peers_chart.py JSON SVG [THREADS]."""
import json
import sys
from xml.sax.saxutils import escape

SHOWN = ("decode", "decode_4k", "decode_4k_q8", "prefill", "prefill_4k", "decode_batch8")
ENGINES = (("reprise", "Reprise", "#2f6fde"), ("llama_cpp", "llama.cpp", "#8a94a3"), ("mlx_lm", "mlx-lm", "#c9ced6"))
WIDTH, LEFT, RIGHT = 760, 210, 240
BAR, GAP, GROUP = 16, 3, 18
TOP, BOTTOM = 74, 34


def text(x, y, words, size=12, weight="normal", fill="#1f2733", anchor="start"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
            f'text-anchor="{anchor}">{escape(words)}</text>')


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def factor(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def bars(figure, y):
    """The group of one figure: each group has a scale of its own, its longest bar as long as the chart is wide."""
    shown = [(name, colour, figure[engine]) for engine, name, colour in ENGINES if figure.get(engine) is not None]
    most = max(value for _, _, value in shown)
    height = len(shown) * (BAR + GAP) - GAP
    parts = [text(LEFT - 14, y + height / 2 + 4, figure.get("title", figure["figure"]), anchor="end")]
    for name, colour, value in shown:
        length = max(1.5, (WIDTH - LEFT - RIGHT) * value / most)
        own = name == "Reprise"
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
        parts.append(text(LEFT + length + 7, y + BAR - 4, number(value), weight="bold" if own else "normal"))
        if own:
            times = ", ".join(f"{factor(value / other)} \u00d7 {peer}" for peer, _, other in shown[1:])
            parts.append(text(LEFT + length + 13 + 7.5 * len(number(value)), y + BAR - 4, times, fill="#5a6472"))
        y += BAR + GAP
    return parts, y - GAP + GROUP


def chart(figures, threads):
    by_name = {figure["figure"]: figure for figure in figures}
    body = [text(20, 28, "Tokens per second on a CPU", size=16, weight="bold"),
            text(20, 47, f"SmolLM2-135M Q4_1, {threads} threads, longer is better", fill="#5a6472")]
    x = WIDTH - 290
    for _, name, colour in ENGINES:
        body.append(f'<rect x="{x}" y="38" width="11" height="11" rx="2" fill="{colour}"/>')
        body.append(text(x + 17, 48, name))
        x += 95
    y = TOP
    for name in SHOWN:
        if name in by_name and by_name[name].get("reprise") is not None:
            parts, y = bars(by_name[name], y)
            body += parts
    height = y - GROUP + BOTTOM
    body.append(text(20, height - 12, "measured by ./run bench peers", size=11, fill="#5a6472"))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Tokens per second of Reprise, llama.cpp and mlx-lm">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>', *body, "</svg>", ""])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as source:
        drawn = chart(json.load(source), sys.argv[3] if len(sys.argv) > 3 else 2)
    with open(sys.argv[2], "w") as out:
        out.write(drawn)
