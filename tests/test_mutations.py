"""The list of mutations keeps up with the code: `make mutate` runs it, which takes long."""

from dataclasses import replace

import mutate


def test_every_mutation_finds_its_text_once():
    assert mutate.check_texts() == []


def test_a_text_that_is_gone_is_found(monkeypatch):
    gone = replace(mutate.MUTATIONS[0], name="gone", text="no such line")
    monkeypatch.setattr(mutate, "MUTATIONS", [gone])
    assert mutate.check_texts() == [f"gone: 0 times in {gone.file}: 'no such line'"]
