"""The picture in the README: what `python main.py --color --compare` really prints, as an SVG.

python demo/picture.py > demo/picture.svg
"""

import re
import subprocess
import sys
from html import escape
from itertools import groupby
from pathlib import Path

COLUMNS, ADVANCE, LINE, MARGIN = 88, 8.4, 20, 18
COMMAND = "python main.py --color --compare"
STYLE = {  # the SGR codes that main.py uses
    "1": "font-weight:bold",
    "2": "opacity:.7",
    "4": "text-decoration:underline",
    "35": "fill:#d2a8ff",
}


def spans(output):
    """Text with SGR codes -> [(text, style)]"""
    style, result = "", []
    for part in re.split(r"(\033\[[0-9;]*m)", output):
        if code := re.fullmatch(r"\033\[([0-9;]*)m", part):
            style = ";".join(STYLE[c] for c in code[1].split(";") if c in STYLE)
        elif part:
            result.append((part, style))
    return result


def wrap(output):
    """[(text, style)] -> lines of them, broken at spaces where a terminal is full"""
    letters = [(letter, style) for text, style in spans(output) for letter in text]
    lines, line = [], []
    for letter in [*letters, ("\n", "")]:
        if letter[0] == "\n":
            lines.append(line)
            line = []
            continue
        line.append(letter)
        if len(line) > COLUMNS:
            space = max(i for i, (c, _) in enumerate(line) if c == " ")
            lines.append(line[:space])
            line = line[space + 1 :]
    joined = []
    for line in lines:
        runs = groupby(line, key=lambda letter: letter[1])
        joined.append([("".join(c for c, _ in run), style) for style, run in runs])
    return joined


def svg(lines):
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">'
    yield f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>'
    yield (
        '<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14"'
        ' fill="#e6edf3" xml:space="preserve">'
    )
    for i, line in enumerate(lines):
        parts = "".join(f'<tspan style="{s}">{escape(t)}</tspan>' for t, s in line)
        length = sum(len(t) for t, _ in line) * ADVANCE
        fit = f' textLength="{length:.0f}" lengthAdjust="spacingAndGlyphs"' if length else ""
        yield f'<text x="{MARGIN}" y="{MARGIN + LINE * (i + 0.75):.0f}"{fit}>{parts}</text>'
    yield "</g></svg>"


if __name__ == "__main__":
    run = subprocess.run(
        [sys.executable, *COMMAND.split()[1:]],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    print("\n".join(svg(wrap(f"$ {COMMAND}\n{run.stdout.rstrip()}"))))
