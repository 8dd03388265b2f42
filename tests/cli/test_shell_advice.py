"""The advice of errors about addresses, as a command to type."""

import click
import pytest
from torch import nn

import tenterhook as th
from tenterhook.cli.shell_advice import for_a_shell


@pytest.mark.parametrize(
    ("address", "command"),
    [("heed", "tenterhook points 'my model' shows every name."), (":heed", "tenterhook points 'my model' ':*' shows ")],
)
def test_the_advice_of_every_address_error_becomes_a_command(address, command):
    with pytest.raises(click.ClickException) as raised, for_a_shell("my model"):
        th.points(nn.Linear(2, 2), address)
    assert raised.value.message.rpartition("\n")[2].startswith(command)
    assert "th.points" not in raised.value.message
