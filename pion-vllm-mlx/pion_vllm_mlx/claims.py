"""Making a name ours to fill: what is to be stored, and what the server says to it."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from pion.client import PionClient, Registered
from pion.client.errors import ExistsError, ServerError
from pion_vllm_mlx.link import logger
from pion_vllm_mlx.prefix_key import Context, TokenIds

Namespace = str | bytes


@attrs.frozen
class Plan:
    """A prefix to be stored: all its tokens, and the stored part that it continues, if any."""

    context: Context
    name: Namespace
    ids: TokenIds
    parent: tuple[Namespace, int] | None
    looked_up: bool
    """A LOOKUP of this name has told the server of the miss."""

    @property
    def offset(self) -> int:
        """The first token whose row is stored here."""
        return self.parent[1] if self.parent is not None else 0

    def hashes(self, block_tokens: int) -> Any:
        """The hashes of the blocks that end in this segment."""
        return self.context.block_hashes(self.ids)[self.offset // block_tokens :]


class Claim(enum.Enum):
    """Whose a namespace is after registering it."""

    OURS = "ours to fill"
    OTHERS = "another client fills it, or has just filled it"
    NO = "the server doesn't want it"


def claim(client: PionClient, plan: Plan) -> Claim:
    """Make the name ours to fill.

    It is registered without META first: if another client has completed it meanwhile, registering succeeds and would
    put our META over its rows. CHAIN shows complete prefixes only. Once ours is pending, nobody else can complete it.

    A server with --admission defers what was looked up in vain too seldom. MATCH counts nothing there, so if the name
    was only matched, this miss is reported now and the server asked again.
    """
    try:
        registered = register(client, plan)
        if registered is Registered.DEFERRED and not plan.looked_up:
            client.prefix_lookup(plan.name, tokens=0)
            registered = register(client, plan)
    except ExistsError as error:  # a name of one's own that something of another shape has
        logger.info("not stored: %s", error)
        return Claim.NO
    except ServerError as error:
        if plan.parent is None or not str(error).startswith("PARENT"):
            raise
        logger.info("not stored: the part it continues went away: %s", error)
        return Claim.NO
    if registered is Registered.DEFERRED:
        logger.debug("not stored: %r was not asked for often enough yet", plan.name)
        return Claim.NO
    if registered is Registered.PENDING or client.prefix_chain(plan.name) is not None:
        return Claim.OTHERS
    return Claim.OURS


def register(client: PionClient, plan: Plan, **options: Any) -> Registered:
    """KV.PREFIX.REGISTER.SCHEMA of a plan, with the further options of `prefix_register_schema`."""
    keys, values = plan.context.layout.runs(plan.context.slots)
    return client.prefix_register_schema(
        plan.name,
        keys,
        values,
        layers=len(plan.context.slots),
        tokens=len(plan.ids) - plan.offset,
        parent=plan.parent,
        **options,
    )
