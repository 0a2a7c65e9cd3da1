"""Environments of other projects as `Env`s; what each needs is imported where it is used."""

from unspool.world.envs.gym import GymTextEnv
from unspool.world.envs.openenv import OpenEnvEnv
from unspool.world.envs.textarena import TextArenaEnv

__all__ = ["GymTextEnv", "OpenEnvEnv", "TextArenaEnv"]
