"""Reference scores of the 57 Atari games: random play, a human tester, and Ape-X as published.

Mean returns of full games from no-op starts. Sources: dqn_zoo's table (random, human), Horgan et al. 2018 (Ape-X).
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Scores(NamedTuple):
    """Mean returns in one game."""

    random: float
    human: float
    ape_x: float


ATARI_SCORES: dict[str, Scores] = {
    "Alien": Scores(227.8, 7127.7, 40804.9),
    "Amidar": Scores(5.8, 1719.5, 8659.2),
    "Assault": Scores(222.4, 742.0, 24559.4),
    "Asterix": Scores(210.0, 8503.3, 313305.0),
    "Asteroids": Scores(719.1, 47388.7, 155495.1),
    "Atlantis": Scores(12850.0, 29028.1, 944497.5),
    "BankHeist": Scores(14.2, 753.1, 1716.4),
    "BattleZone": Scores(2360.0, 37187.5, 98895.0),
    "BeamRider": Scores(363.9, 16926.5, 63305.2),
    "Berzerk": Scores(123.7, 2630.4, 57196.7),
    "Bowling": Scores(23.1, 160.7, 17.6),
    "Boxing": Scores(0.1, 12.1, 100.0),
    "Breakout": Scores(1.7, 30.5, 800.9),
    "Centipede": Scores(2090.9, 12017.0, 12974.0),
    "ChopperCommand": Scores(811.0, 7387.8, 721851.0),
    "CrazyClimber": Scores(10780.5, 35829.4, 320426.0),
    "Defender": Scores(2874.5, 18688.9, 411943.5),
    "DemonAttack": Scores(152.1, 1971.0, 133086.4),
    "DoubleDunk": Scores(-18.6, -16.4, 23.5),
    "Enduro": Scores(0.0, 860.5, 2177.4),
    "FishingDerby": Scores(-91.7, -38.7, 44.4),
    "Freeway": Scores(0.0, 29.6, 33.7),
    "Frostbite": Scores(65.2, 4334.7, 9328.6),
    "Gopher": Scores(257.6, 2412.5, 120500.9),
    "Gravitar": Scores(173.0, 3351.4, 1598.5),
    "Hero": Scores(1027.0, 30826.4, 31655.9),
    "IceHockey": Scores(-11.2, 0.9, 33.0),
    "Jamesbond": Scores(29.0, 302.8, 21322.5),
    "Kangaroo": Scores(52.0, 3035.0, 1416.0),
    "Krull": Scores(1598.0, 2665.5, 11741.4),
    "KungFuMaster": Scores(258.5, 22736.3, 97829.5),
    "MontezumaRevenge": Scores(0.0, 4753.3, 2500.0),
    "MsPacman": Scores(307.3, 6951.6, 11255.2),
    "NameThisGame": Scores(2292.3, 8049.0, 25783.3),
    "Phoenix": Scores(761.4, 7242.6, 224491.1),
    "Pitfall": Scores(-229.4, 6463.7, -0.6),
    "Pong": Scores(-20.7, 14.6, 20.9),
    "PrivateEye": Scores(24.9, 69571.3, 49.8),
    "Qbert": Scores(163.9, 13455.0, 302391.3),
    "Riverraid": Scores(1338.5, 17118.0, 63864.4),
    "RoadRunner": Scores(11.5, 7845.0, 222234.5),
    "Robotank": Scores(2.2, 11.9, 73.8),
    "Seaquest": Scores(68.4, 42054.7, 392952.3),
    "Skiing": Scores(-17098.1, -4336.9, -10789.9),
    "Solaris": Scores(1236.3, 12326.7, 2892.9),
    "SpaceInvaders": Scores(148.0, 1668.7, 54681.0),
    "StarGunner": Scores(664.0, 10250.0, 434342.5),
    "Surround": Scores(-10.0, 6.5, 7.1),
    "Tennis": Scores(-23.8, -8.3, 23.9),
    "TimePilot": Scores(3568.0, 5229.2, 87085.0),
    "Tutankham": Scores(11.4, 167.6, 272.6),
    "UpNDown": Scores(533.4, 11693.2, 401884.3),
    "Venture": Scores(0.0, 1187.5, 1813.0),
    "VideoPinball": Scores(16256.9, 17667.9, 565163.2),
    "WizardOfWor": Scores(563.5, 4756.5, 46204.0),
    "YarsRevenge": Scores(3092.9, 54576.9, 148594.8),
    "Zaxxon": Scores(32.5, 9173.3, 42285.5),
}
"""By EnvPool's name of the game, without the version: "Pong" for Pong-v5."""


def human_normalized_score(task: str, episode_return: float) -> float | None:
    """Returns (return - random) / (human - random): 0 plays like random, 1 like the human tester.

    `task`: an EnvPool task, with or without its version. Returns None if it is not one of the 57 games.
    """
    scores = ATARI_SCORES.get(re.sub(r"-v\d+$", "", task))
    if scores is None:
        return None
    return (episode_return - scores.random) / (scores.human - scores.random)
