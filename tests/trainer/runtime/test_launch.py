"""What a process is told of its launch and its order, and what was set by another version or by hand."""

import pytest

from trainer.errors import ConfigError
from trainer.runtime.launch import LAUNCH_VARIABLE, ORDER, GivenOrder, Launch, with_order


def test_what_is_told_arrives_and_an_order_keeps_what_others_have_said():
    launch = Launch(number=3, incarnation=2, is_elastic=True, secret_uri="az://c/launch-secrets/one")
    assert Launch.read(launch.variables()) == launch
    assert Launch.read({}) == Launch(), "where there is no cluster"
    ordered = with_order(with_order({"A": "b"}, is_tracked=False), run_dir="/runs/one", overrides=("a=1",))
    assert ordered["A"] == "b"
    assert GivenOrder.read(ordered) == GivenOrder(is_tracked=False, run_dir="/runs/one", overrides=("a=1",))


@pytest.mark.parametrize("text", ["1", "[]", "yes", '{"of_a_later_version": 1}'])
def test_what_another_version_has_set_is_refused_with_the_remedy(text: str):
    for kind, name in ((Launch, LAUNCH_VARIABLE), (GivenOrder, ORDER)):
        with pytest.raises(ConfigError, match=f"{name}=.*start the job again"):
            kind.read({name: text})
