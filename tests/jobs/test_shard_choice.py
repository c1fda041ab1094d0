"""Workers that are given INDEX/COUNT, by hand or by a scheduler, share all shards out and take none twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.shards import choose_shards
from relabel.manifests.errors import UsageError


def slurm(index: int, first: int, last: int, step: int = 1, **more: str) -> dict[str, str]:
    count = (last - first) // step + 1
    names = {"ID": index, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {**{f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}, **more}


@given(count=st.integers(1, 40), num_shards=st.integers(0, 200))
def test_workers_share_out_every_shard_once(count: int, num_shards: int) -> None:
    taken = [choose_shards(f"{index}/{count}", num_shards, {}) for index in range(count)]
    assert sorted(shard for shards in taken for shard in shards) == list(range(num_shards))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_index_and_count_pick_the_shards_that_leave_the_index() -> None:
    assert choose_shards("3/64", 200, {}) == [3, 67, 131, 195]
    assert choose_shards(" 0/1 ", 3, {}) == [0, 1, 2]


def test_no_choice_takes_every_shard_even_under_a_scheduler() -> None:
    assert choose_shards(None, 3, slurm(1, 0, 3)) == [0, 1, 2]


def test_a_worker_beyond_the_shards_takes_none() -> None:
    assert choose_shards("7/8", 4, {}) == []


@given(
    first=st.integers(0, 50),
    step=st.integers(1, 7),
    count=st.integers(1, 20),
    slack=st.integers(0, 6),
    num_shards=st.integers(1, 60),
)
def test_slurm_arrays_share_out_every_shard_once(
    first: int, step: int, count: int, slack: int, num_shards: int
) -> None:
    """Slurm's MAX may lie beyond the last task: 1-10:4 has the tasks 1, 5 and 9."""
    last = first + (count - 1) * step + min(slack, step - 1)
    tasks = range(first, last + 1, step)
    taken = [choose_shards("auto", num_shards, slurm(task, first, last, step)) for task in tasks]
    assert sorted(shard for shards in taken for shard in shards) == list(range(num_shards))


def test_slurm_index_counts_from_the_arrays_first_task() -> None:
    assert choose_shards("auto", 12, slurm(10, 4, 13, 3)) == [2, 6, 10]


def test_slurm_array_with_gaps_is_refused_since_shards_would_fall_to_nobody() -> None:
    with pytest.raises(UsageError, match=r"1-7:1 has gaps.*0-6, or give INDEX/COUNT"):
        choose_shards("auto", 8, {**slurm(3, 1, 7), "SLURM_ARRAY_TASK_COUNT": "3"})


@pytest.mark.parametrize(("index", "first", "last", "step"), [(5, 4, 8, 2), (3, 4, 8, 1), (9, 4, 8, 1)])
def test_slurm_task_outside_its_own_array_is_refused(index: int, first: int, last: int, step: int) -> None:
    with pytest.raises(UsageError, match=f"Slurm's task {index} does not fit its array {first}-{last}:{step}"):
        choose_shards("auto", 8, slurm(index, first, last, step))


def test_slurm_without_the_arrays_end_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SLURM_ARRAY_TASK_MAX is not set.*--shard 3/64"):
        choose_shards("auto", 8, {"SLURM_ARRAY_TASK_ID": "2"})


def test_aws_batch_gives_index_and_size() -> None:
    assert choose_shards("auto", 8, {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}) == [1, 4, 7]


def test_aws_batch_size_gives_way_to_our_own_variable() -> None:
    given_size = {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "3", "RELABEL_SHARD_COUNT": "4"}
    assert choose_shards("auto", 8, given_size) == [1, 5]


def test_kubernetes_index_takes_its_count_from_our_variable() -> None:
    assert choose_shards("auto", 8, {"JOB_COMPLETION_INDEX": "3", "RELABEL_SHARD_COUNT": "4"}) == [3, 7]


@pytest.mark.parametrize("index_name", ["JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX"])
def test_index_without_a_count_says_which_variable_to_set(index_name: str) -> None:
    with pytest.raises(UsageError, match=f"{index_name} gives an index but no count. Set RELABEL_SHARD_COUNT"):
        choose_shards("auto", 8, {index_name: "3"})


def test_auto_without_a_scheduler_says_what_it_looked_for() -> None:
    with pytest.raises(
        UsageError, match=r"SLURM_ARRAY_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX, JOB_COMPLETION_INDEX.*Give INDEX/COUNT"
    ):
        choose_shards("auto", 8, {"RELABEL_SHARD_COUNT": "4"})


@pytest.mark.parametrize("junk", ["", "x", "-1", "1.5", "1/4"])
def test_junk_in_a_schedulers_variable_is_quoted(junk: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose_shards("auto", 8, {"JOB_COMPLETION_INDEX": junk, "RELABEL_SHARD_COUNT": "4"})
    assert f"JOB_COMPLETION_INDEX is {junk!r}" in str(raised.value)


@pytest.mark.parametrize("text", ["", "3", "3/", "/4", "a/b", "-1/4", "1/-4", "1.0/4", "1/4/2", "1:4", "AUTO", "1 / 4"])
def test_malformed_choice_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"want INDEX/COUNT, counted from 0 \(the first of four is 0/4\), or auto"):
        choose_shards(text, 8, {})


@pytest.mark.parametrize("text", ["4/4", "9/4"])
def test_index_out_of_range_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(UsageError, match=rf"--shard {text}: the index must be one of 0 to 3 \(the last of 4 is 3/4\)"):
        choose_shards(text, 8, {})


@pytest.mark.parametrize("text", ["0/0", "3/0"])
def test_a_count_of_none_is_refused_with_what_takes_all(text: str) -> None:
    with pytest.raises(UsageError, match=f"--shard {text}: the count must be at least 1; 0/1 takes every shard"):
        choose_shards(text, 8, {})


def test_schedulers_index_out_of_range_names_the_scheduler() -> None:
    with pytest.raises(UsageError, match="the scheduler's 5/4: the index must be one of 0 to 3"):
        choose_shards("auto", 8, {"JOB_COMPLETION_INDEX": "5", "RELABEL_SHARD_COUNT": "4"})
