"""What the generator writes is what controllers write: readable, repeatable, and plausible."""

from collections import Counter

from batonmq.epoch.file_cache import EpochFileCache
from batonmq.history.fold import stories
from batonmq.history.reader import read_histories
from tests.spark.generated_histories import generate


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name in ("a", "b"):
        generate(tmp_path / name, count=500, groups=2)
    generate(tmp_path / "c", count=500, groups=2, seed=2)
    assert files(tmp_path / "a") == files(tmp_path / "b") != files(tmp_path / "c")


def test_the_stories_are_those_of_a_cluster_that_mends_itself(tmp_path):
    done = generate(tmp_path, count=3_000, groups=3, file_bytes=200_000)
    folders = sorted((tmp_path / "history").iterdir())
    sources, problems = read_histories(folders)
    assert problems == []
    told = [len(events) for events in sources.values()]
    assert told[0] == told[1] == done >= 3_000 and done - told[2] == 150
    assert len(list(folders[0].iterdir())) > 2  # full files with a number
    found = stories(next(iter(sources.values())))
    kinds = Counter(story.kind for story in found)
    assert all(kinds[kind] > 3 for kind in ("failover", "planned_switch", "controller_change"))
    assert sum(story.overtaken for story in found) > 3
    assert sum(story.truncated_bytes > 0 for story in found) > 30
    assert not any(story.out_of_order() for story in found)
    lists = [
        EpochFileCache(tmp_path / "stores" / f"broker-00-{number}" / "epochFileCheckpoint").entries
        for number in (1, 2, 3)
    ]
    assert lists[0] == lists[1] == lists[2]
    won = [s.master_epoch for s in found if s.is_election and s.broker_name == "broker-00"]
    assert [entry.epoch for entry in lists[0]] == won
