"""The gallery prints its table by one command, and every line of it is what is expected."""

from programs import run_example

# what the step does -> convention, factor, right
EXPECTED = {
    "pmap: pmean of normalised losses": ("mean_of_means", "1", "no"),
    "shard_map: pmean of normalised losses": ("mean_of_means", "2", "no"),
    "pmap: the textbook rule": ("global_mean", "1", "yes"),
    "shard_map: the textbook rule": ("times_ranks", "2", "no"),
    "shard_map(check_vma=False): the textbook rule": ("global_mean", "1", "yes"),
    "pmap: psum of gradients over psum of weights": ("global_mean", "1", "yes"),
    "shard_map: psum of gradients over psum of weights": ("times_ranks", "2", "no"),
    "pmap: ... over at least 1": ("clamped_weight", "1", "no"),
    "pmap: pmean of totals over the global weight": ("divided_by_ranks", "0.5", "no"),
    "pmap: jnp.mean(losses * mask)": ("padding_counted", "1", "no"),
    "optax.MultiSteps on microbatch means": ("mean_of_means", "1", "no"),
    "microbatch means added up": ("mean_of_means", "3", "no"),
    "jit: a scan that averages global means": ("step_token_mean", "1", "no"),
    "torch DDP, each rank's mean": ("mean_of_means", "1", "no"),
    "torch DDP join, initial world size": ("mean_of_means", "1", "no"),
    "torch DDP join, active ranks": ("mean_of_nonempty_means", "1", "no"),
    "shard_map: pmean of rank_share": ("global_mean", "1", "yes"),
    "shard_map: value_and_grad": ("global_mean", "1", "yes"),
    "weighted_multi_steps on microbatch means": ("global_mean", "1", "yes"),
}


def run(*arguments):
    return run_example("gallery.py", *arguments).splitlines()


def test_the_gallerys_table_is_as_expected():
    head, *lines = run()
    found = {line[: head.index("its convention")].strip(): line.split()[-3:] for line in lines}
    assert {name: tuple(each) for name, each in found.items()} == EXPECTED


def test_the_gallery_shows_one_of_its_pieces():
    lines = run("optax.MultiSteps on microbatch means")
    assert lines[0].startswith("mean_of_means, factor 1: the step takes the mean of the means")
    assert [line.split()[0] for line in lines[2:4]] == ["microbatch", "rank"]
    assert any(line.startswith("Fix: Add sums and weights") for line in lines)
