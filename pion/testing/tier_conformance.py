"""What every tier must do, as tests for pytest-trio: subclass `TierConformance`, and say how to make your tier.

    class TestMyTier(TierConformance):
        settle_s = 2.0

        @pytest.fixture
        def make_tier(self, my_server):
            return lambda: MyTier(f"mine://{my_server}/bucket")

`make_tier` is a function that returns a tier, not started; each call gives another one over the same objects, and there
are none when a test begins. With `settle_s` a test waits for what was put or deleted to be seen, as long as it takes.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import ClassVar, Final

import trio

from pion.config import MIB
from pion.replies import Buffer
from pion.storage.tiers.base import OpenedObject, Tier, TierMissError
from pion.storage.tiers.tier_format import Head, Layout, RowRun, lay_out, read_head

MakeTier = Callable[[], Tier]

DEADLINE_S: Final = 60.0
"""A test that takes longer has failed."""

LATE_S: Final = 10.0
"""How long a cancelled put may still be seen at work."""


def make_key() -> str:
    """A key as the store makes them."""
    return secrets.token_hex(16)


def make_layout(key: str, nbytes: int = 4096, *, fill: int = 1, layers: int = 2, register: bytes = b"") -> Layout:
    """An object whose rows are `nbytes` long, all with the bytes `fill`."""
    width = max(1, nbytes // layers // 2 // 16)
    rows = [RowRun(side, layer, 0, 16, [bytes((fill,)) * (16 * width)]) for side in (0, 1) for layer in range(layers)]
    return lay_out(key, register, rows)


async def read_all(opened: OpenedObject, key: str) -> tuple[Head, list[bytes]]:
    """The head of an object, and its rows, run by run. Raises TierMissError if any of it is not what was put."""

    def read() -> tuple[Head, list[bytes]]:
        head = read_head(opened.mapping, key)
        regions = [run.region(opened.mapping) for run in head.runs]
        if not all(region.verify() for region in regions):
            raise TierMissError("its rows are damaged", damaged=True)
        return head, [bytes(region.view()) for region in regions]

    return await trio.to_thread.run_sync(read)


def check(condition: object, text: str) -> None:
    """As `assert`, in a module that is no test."""
    if not condition:
        raise AssertionError(text)


@asynccontextmanager
async def running(tier: Tier) -> AsyncIterator[Tier]:
    """A started tier; it is closed at the end, and the block must not take too long."""
    with trio.fail_after(DEADLINE_S):
        await tier.start()
        try:
            yield tier
        finally:
            await tier.aclose()


class TierConformance:
    """Tests that every tier passes."""

    settle_s: ClassVar[float] = 0.0
    """How long it may take until what was put or deleted is seen; 0: it is seen at once."""
    large_bytes: ClassVar[int] = 64 * MIB
    """The size of the large object."""
    many: ClassVar[int] = 200
    """How many objects are many."""

    # What the tests share.

    async def settled(self, look: Callable[[], Awaitable[bool]], text: str, *, late_s: float = 0.0) -> None:
        """Wait until `look` says yes. Raises AssertionError with the text if it doesn't in time."""
        within_s = self.settle_s + late_s
        until_s = trio.current_time() + within_s
        while not await look():
            check(trio.current_time() < until_s, text)
            await trio.sleep(within_s / 100)

    async def is_there(self, tier: Tier, key: str) -> bool:
        """Whether an object can be opened; it must be whole then."""
        try:
            opened = await tier.open(key)
        except TierMissError as error:
            check(not error.damaged, f"a missing object is not a damaged one: {error}")
            return False
        await read_all(opened, key)
        opened.close()
        return True

    async def expect(self, tier: Tier, layout: Layout, key: str) -> None:
        """The object is there, with these bytes."""
        await self.settled(lambda: self.is_there(tier, key), f"{key} can't be opened after it was put")
        opened = await tier.open(key)
        head, rows = await read_all(opened, key)
        check(head.runs == layout.runs, "the object has other runs than were put")
        check(b"".join(rows) == b"".join(layout.parts), "the object has other rows than were put")
        check(opened.nbytes == layout.nbytes, "the object has another size than was put")
        opened.close()

    async def expect_gone(self, tier: Tier, key: str) -> None:
        """The object can't be opened."""

        async def look() -> bool:
            return not await self.is_there(tier, key)

        await self.settled(look, f"{key} can be opened after it was deleted")

    async def keys(self, tier: Tier) -> list[str]:
        """All keys that a listing has."""
        async with aclosing(tier.scan()) as found:
            return sorted([each.key async for each in found])

    async def expect_keys(self, tier: Tier, keys: Sequence[str]) -> None:
        """A listing has exactly these."""

        async def look() -> bool:
            return await self.keys(tier) == sorted(keys)

        await self.settled(look, f"a listing doesn't have exactly the {len(keys)} objects that are there")

    async def put(self, tier: Tier, nbytes: int = 4096, fill: int = 1) -> tuple[str, Layout]:
        """Put a new object."""
        key = make_key()
        layout = make_layout(key, nbytes, fill=fill)
        await tier.put(key, layout.head, layout.parts)
        return key, layout

    # The tests.

    async def test_what_was_put_is_opened(self, make_tier: MakeTier) -> None:
        """The same bytes, in whichever pieces they were given."""
        async with running(make_tier()) as tier:
            key = make_key()
            layout = make_layout(key, 4096, register=b"how it was registered")
            whole = memoryview(b"".join(layout.parts))
            pieces: list[Buffer] = [whole[:1], whole[1:1], whole[1:1000], bytes(whole[1000:])]
            await tier.put(key, layout.head, pieces)
            await self.expect(tier, layout, key)
            head = read_head((await tier.open(key)).mapping)
            check((head.key, head.register) == (key, b"how it was registered"), "its head is another one")

    async def test_a_missing_object_is_a_miss(self, make_tier: MakeTier) -> None:
        """One that was never put."""
        async with running(make_tier()) as tier:
            await self.put(tier)
            check(not await self.is_there(tier, make_key()), "an object is there that was never put")

    async def test_what_is_no_key_is_refused(self, make_tier: MakeTier) -> None:
        """Nothing but 32 hexadecimal digits gets into names or requests."""
        async with running(make_tier()) as tier:
            for key in ("", "a", "../" + "a" * 29, "A" * 32, "a" * 31 + "/", "a" * 33, "a" * 32 + "\n"):
                calls = (lambda: tier.put(key, b"", []), lambda: tier.open(key), lambda: tier.delete([key]))  # noqa: B023
                for call in calls:
                    try:
                        await call()
                    except ValueError:
                        continue
                    raise AssertionError(f"the key {key!r} was accepted")

    async def test_an_object_outlives_the_tier_object(self, make_tier: MakeTier) -> None:
        """It is durable: another start finds it."""
        async with running(make_tier()) as tier:
            key, layout = await self.put(tier)
        async with running(make_tier()) as tier:
            await self.expect(tier, layout, key)
            await self.expect_keys(tier, [key])

    async def test_a_large_object(self, make_tier: MakeTier) -> None:
        """Whole, and counted."""
        async with running(make_tier()) as tier:
            key, layout = await self.put(tier, self.large_bytes)
            check(layout.nbytes >= self.large_bytes, "it is not large")
            await self.expect(tier, layout, key)
            check(tier.used_bytes >= self.large_bytes, "it is not in used_bytes")
            await tier.delete([key])
            await self.expect_gone(tier, key)

    async def test_the_same_key_again_replaces(self, make_tier: MakeTier) -> None:
        """The newer one is seen in the end, whole, also if it is shorter; never a mixture."""
        async with running(make_tier()) as tier:
            key, _ = await self.put(tier, 8192, fill=1)
            for fill, nbytes in ((2, 16384), (3, 4096)):
                layout = make_layout(key, nbytes, fill=fill)
                await tier.put(key, layout.head, layout.parts)

                async def look(layout: Layout = layout) -> bool:
                    try:
                        opened = await tier.open(key)
                    except TierMissError:
                        return False
                    return (await read_all(opened, key))[0].runs == layout.runs

                await self.settled(look, "the older object is still there")
            await self.expect_keys(tier, [key])

    async def test_deleted_objects_are_gone(self, make_tier: MakeTier) -> None:
        """Those and no others; what is not there is no error, in a list of any length."""
        async with running(make_tier()) as tier:
            (first, _), (second, _), (third, layout) = [await self.put(tier) for _ in range(3)]
            await tier.delete([])
            await tier.delete([make_key()])
            await tier.delete([first, make_key(), second, first])
            await self.expect_gone(tier, first)
            await self.expect_gone(tier, second)
            await self.expect(tier, layout, third)
            await self.expect_keys(tier, [third])
            await tier.delete([first, second])

    async def test_an_open_object_stays_readable(self, make_tier: MakeTier) -> None:
        """Whole and unchanged, when it is deleted or replaced, closed, and when the tier is closed."""
        async with running(make_tier()) as tier:
            deleted, gone = await self.put(tier, 100_000, fill=7)
            replaced, old = await self.put(tier, 100_000, fill=8)
            await self.expect(tier, gone, deleted)
            await self.expect(tier, old, replaced)
            opened = [await tier.open(deleted), await tier.open(replaced)]
            await tier.delete([deleted])
            new = make_layout(replaced, 50_000, fill=9)
            await tier.put(replaced, new.head, new.parts)
            await self.expect_gone(tier, deleted)
        for key, layout, each in zip((deleted, replaced), (gone, old), opened, strict=True):
            head, rows = await read_all(each, key)
            check((head.runs, b"".join(rows)) == (layout.runs, b"".join(layout.parts)), "it changed while it was open")
            region = head.runs[0].region(each.mapping)
            each.close()
            each.close()
            check(bytes(region.view()) == rows[0], "a view ends with the object that it was taken from")

    async def test_an_open_object_tells_where_it_ends(self, make_tier: MakeTier) -> None:
        """Reading beyond its end is an OSError, not fewer bytes."""
        async with running(make_tier()) as tier:
            key, layout = await self.put(tier)
            await self.expect(tier, layout, key)
            opened = await tier.open(key)
            check(len(opened.mapping.view) == opened.nbytes == layout.nbytes, "its mapping has another size")
            check(opened.mapping.view.readonly, "its mapping can be written to")
            buffer = bytearray(2)
            try:
                opened.mapping.read_into(opened.nbytes - 1, memoryview(buffer))
            except OSError:
                return
            raise AssertionError("bytes behind the end were read")

    async def test_many_objects_are_listed(self, make_tier: MakeTier) -> None:
        """Each once, with its size; used_bytes is their sum."""
        async with running(make_tier()) as tier:
            sizes = {}
            for index in range(self.many):
                key, layout = await self.put(tier, 1024 + 64 * (index % 7))
                sizes[key] = layout.nbytes
            await self.expect_keys(tier, list(sizes))
            async with aclosing(tier.scan()) as listing:
                found = [each async for each in listing]
            check({each.key: each.nbytes for each in found} == sizes, "sizes in the listing are wrong")
            check(all(each.modified_s >= 0 for each in found), "a time is negative")
            check(tier.used_bytes == sum(sizes.values()), "used_bytes is not the sum of the sizes")
            doomed = list(sizes)[::2]
            await tier.delete(doomed)
            await self.expect_keys(tier, [key for key in sizes if key not in doomed])

    async def test_a_listing_may_be_left(self, make_tier: MakeTier) -> None:
        """In the middle; a later one is complete, and so is one beside which objects come and go."""
        async with running(make_tier()) as tier:
            keys = [(await self.put(tier, 1024))[0] for _ in range(20)]
            await self.expect_keys(tier, keys)
            async with aclosing(tier.scan()) as listing:
                async for _ in listing:
                    break
            seen = []
            async with aclosing(tier.scan()) as listing:
                async for found in listing:
                    seen.append(found.key)
                    if len(seen) == 5:
                        await tier.delete([keys[0]])
                        new, _ = await self.put(tier, 1024)
            check(set(keys[1:]) <= set(seen) <= {*keys, new}, "a listing misses objects that were there all the time")
            check(len(set(seen)) == len(seen), "a listing has an object twice")

    async def test_clean_removes_what_is_disowned(self, make_tier: MakeTier) -> None:
        """And nothing else; it says how much that was."""
        async with running(make_tier()) as tier:
            objects = [await self.put(tier, 2048) for _ in range(6)]
            await self.expect_keys(tier, [key for key, _ in objects])
            kept = {key for key, _ in objects[:4]}
            cleaned = await tier.clean(lambda key: key in kept)
            expected = sum(layout.nbytes for _, layout in objects[4:])
            check((cleaned.files, cleaned.nbytes, cleaned.errors) == (2, expected, 0), f"it says {cleaned}")
            await self.expect_keys(tier, sorted(kept))
            for key, layout in objects[:4]:
                await self.expect(tier, layout, key)
            again = await tier.clean(lambda key: key in kept)
            check((again.files, again.nbytes, again.errors) == (0, 0, 0), f"it says {again} the second time")

    async def test_at_the_same_time(self, make_tier: MakeTier) -> None:
        """Puts, opens, deletes and a cleaning beside one another; of one key, too."""
        async with running(make_tier()) as tier:
            shared = make_key()
            layouts = {fill: make_layout(shared, 50_000, fill=fill) for fill in range(1, 6)}
            done: dict[str, Layout] = {}

            async def put_shared(layout: Layout) -> None:
                await tier.put(shared, layout.head, layout.parts)

            async def live() -> None:
                key, layout = make_key(), None
                done[key] = layout = make_layout(key, 20_000)
                await tier.put(key, layout.head, layout.parts)
                other, _ = await self.put(tier)
                await tier.delete([other])
                await self.expect(tier, layout, key)

            async with trio.open_nursery() as nursery:
                for layout in layouts.values():
                    nursery.start_soon(put_shared, layout)
                for _ in range(8):
                    nursery.start_soon(live)
                nursery.start_soon(tier.clean, lambda key: True)
            for key, layout in done.items():
                await self.expect(tier, layout, key)
            await self.expect_keys(tier, [shared, *done])
            head, _ = await read_all(await tier.open(shared), shared)
            check(head.runs in [layout.runs for layout in layouts.values()], "the shared object is a mixture")

    async def test_a_cancelled_put_leaves_a_whole_object_or_none(self, make_tier: MakeTier) -> None:
        """Whenever it is cancelled; after a delete and a cleaning nothing is left of it."""
        async with running(make_tier()) as tier:
            for tenths_ms in range(12):
                key = make_key()
                layout = make_layout(key, 4 * MIB)
                with trio.move_on_after(tenths_ms * tenths_ms / 10_000):
                    await tier.put(key, layout.head, layout.parts)
                await self.is_there(tier, key)  # and whole, if it is

                async def look(key: str = key) -> bool:
                    await tier.delete([key])
                    return not await self.is_there(tier, key)

                await self.settled(look, "what a cancelled put has left can't be deleted", late_s=LATE_S)
        async with running(make_tier()) as tier:
            await tier.clean(lambda key: False)
            await self.expect_keys(tier, [])
            check(tier.used_bytes == 0, "bytes are counted that nothing has")

    async def test_cancelled_calls_change_nothing_else(self, make_tier: MakeTier) -> None:
        """Opening, listing and cleaning, cancelled before they begin."""
        async with running(make_tier()) as tier:
            key, layout = await self.put(tier)
            await self.expect(tier, layout, key)
            for call in (lambda: tier.open(key), lambda: self.keys(tier), lambda: tier.clean(lambda key: True)):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await call()
                check(scope.cancelled_caught, "a call does not notice that it is cancelled")
            await self.expect(tier, layout, key)
