"""Memory of processes over time, as an SVG picture; faults are marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["plot"]

_WIDTH, _HEIGHT, _EDGE = 840, 360, 48
_COLOURS = {"supervisor": "#546e7a", "engine": "#1565c0", "api-0": "#c62828"}


def plot(lives: Iterable[Any], faults: Sequence[tuple[float, str]]) -> str:
    """``lives`` have a name and samples of (seconds, bytes, ...); a fault is (seconds, what)."""
    lives = [life for life in lives if life.samples]
    end = max([sample[0] for life in lives for sample in life.samples], default=1.0)
    most = 1.1 * max([sample[1] for life in lives for sample in life.samples], default=1.0) / (1 << 20)

    def x(seconds: float) -> float:
        return _EDGE + seconds / end * (_WIDTH - 2 * _EDGE)

    def y(mib: float) -> float:
        return _HEIGHT - _EDGE - mib / most * (_HEIGHT - 2 * _EDGE)

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>']
    for at, what in faults:
        dash = "" if what.startswith("kill") else ' stroke-dasharray="2 4"'
        parts.append(
            f'<path d="M{x(at):.1f} {_EDGE} V{_HEIGHT - _EDGE}" stroke="#b0bec5"{dash}><title>{what}</title></path>'
        )
    for life in lives:
        points = " ".join(f"{x(s[0]):.1f},{y(s[1] / (1 << 20)):.1f}" for s in life.samples)
        colour = _COLOURS.get(life.name, "#2e7d32")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for place, (name, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{_EDGE + 8 + 110 * place}" y="{_EDGE - 14}" fill="{colour}">{name}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{_EDGE - 6}" y="{y(share * most) + 4:.0f}" text-anchor="end">{share * most:.0f}</text>')
        minutes = share * end / 60
        parts.append(
            f'<text x="{x(share * end):.0f}" y="{_HEIGHT - _EDGE + 16}" text-anchor="middle">{minutes:.0f}</text>'
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">minutes; grey: faults</text>')
    parts.append(f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">PSS, MiB</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    return f'{head} font-size="11">{"".join(parts)}</svg>\n'
