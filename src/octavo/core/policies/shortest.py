"""Shortest remaining work first: the least mean waiting time there is, and the least fair one."""

from __future__ import annotations

from octavo.core.policies.base import Key, Policy, PolicySettings, Scene
from octavo.core.request import Branch


class ShortestWork(Policy):
    """Fewest tokens still to compute first: known ones without K/V, and output up to the request's own limit.

    A comparison rather than a recommendation: outputs end when they like, and ``max_tokens`` only bounds them.
    """

    name = "shortest"

    def __init__(self) -> None:
        self._settings = PolicySettings()

    def prepare(self, scene: Scene) -> None:
        """Look at the prices."""
        self._settings = scene.settings

    def key(self, branch: Branch) -> Key:
        """(work left, in units of service,)."""
        output = max(0, branch.request.token_limit - branch.num_tokens)
        return (self._settings.prompt_price * branch.num_missing_tokens + self._settings.output_price * output,)

    def rank(self, branch: Branch) -> Key:
        """As they came: who runs finishes."""
        return ()
