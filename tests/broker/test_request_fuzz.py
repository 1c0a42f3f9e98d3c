"""No request ends the broker or a feature of it, whatever is in its fields (R46, R54)."""

from pathlib import Path

import pytest
from lone_broker import Rig, run_with_broker
from request_fuzz import RequestFuzz, check_features


@pytest.mark.parametrize("seed", range(2))
def test_r46_r54_after_odd_requests_of_every_code_all_works(tmp_path: Path, seed: int) -> None:
    async def play(rig: Rig) -> None:
        await rig.send("T", b"x")
        odd = await RequestFuzz(rig, seed).run(rounds=3)
        await check_features(rig)
        assert not odd, "\n".join(odd)

    run_with_broker(tmp_path, play)
    run_with_broker(tmp_path, check_features)  # the restart is clean
