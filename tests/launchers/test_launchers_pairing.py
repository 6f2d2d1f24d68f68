"""Pairing by a code: who has it gets in, who guesses does not, and does not get many guesses."""

from __future__ import annotations

import pytest

from tandem.errors import ConfigError, UsageError
from tandem.launchers.agent.pairing import ATTEMPTS, LIFE_S, MOST_RUNS, AgentSide, HeadSide
from tandem.launchers.agent.trust import Peer, Trust, checked_name
from tandem.protocol.agent_messages import PairConfirm, PairElement, PairHello, PairIdentity, PairProof, PairRefused, PairStart

HEAD = PairHello("head", "H" * 40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def agent() -> AgentSide:
    return AgentSide("a", "A" * 40, Clock())


def attempt(agent: AgentSide, code: str, peer: bytes = b"1", hello: PairHello = HEAD) -> PairHello | None:
    """The head whom the agent trusts in the end. Raises UsageError for what the head notices."""
    identity, _ = agent.answer(peer, hello)
    if isinstance(identity, PairRefused):
        raise UsageError(identity.reason)
    assert isinstance(identity, PairIdentity)
    head = HeadSide(code, hello, identity)
    element, _ = agent.answer(peer, head.start())
    if isinstance(element, PairRefused):
        raise UsageError(element.reason)
    assert isinstance(element, PairElement)
    done, trusted = agent.answer(peer, head.confirm(element))
    if isinstance(done, PairRefused):
        assert trusted is None
        raise UsageError(done.reason)
    assert isinstance(done, PairProof)
    head.check(done)
    return trusted


def wrong(code: str) -> str:
    return f"{(int(code) + 1) % 1000000:06d}"


def test_the_code_pairs_once(agent):
    code = agent.open()
    assert len(code) == 6 and code.isdigit()
    assert attempt(agent, f"{code[:3]} {code[3:]}") == HEAD
    with pytest.raises(UsageError, match="shows no code"):
        attempt(agent, code)


def test_without_a_code_nobody_pairs(agent):
    with pytest.raises(UsageError, match="shows no code"):
        attempt(agent, "123456")


def test_a_wrong_code_is_refused_and_few_may_be_tried(agent):
    code = agent.open()
    for _ in range(ATTEMPTS):
        with pytest.raises(UsageError, match="wrong"):
            attempt(agent, wrong(code))
    with pytest.raises(UsageError, match="shows no code"):
        attempt(agent, code)
    assert attempt(agent, agent.open()) == HEAD


def test_runs_that_are_left_off_count_as_well(agent):
    """A guesser that goes away before its proof has had its guess: nothing told it whether it was right."""
    code = agent.open()
    for number in range(ATTEMPTS):
        peer = b"guesser %d" % number
        identity, _ = agent.answer(peer, HEAD)
        element, _ = agent.answer(peer, HeadSide(wrong(code), HEAD, identity).start())
        assert isinstance(element, PairElement)
    identity, _ = agent.answer(b"4", HEAD)
    reply, _ = agent.answer(b"4", HeadSide(code, HEAD, identity).start())
    assert isinstance(reply, PairRefused)


def test_a_code_expires():
    clock = Clock()
    agent = AgentSide("a", "A" * 40, clock)
    code = agent.open()
    clock.now = LIFE_S + 1
    with pytest.raises(UsageError, match="shows no code"):
        attempt(agent, code)


def test_a_code_that_is_renewed_while_somebody_types_is_taken(agent):
    agent.open()
    identity, _ = agent.answer(b"1", HEAD)
    head = HeadSide(agent.open(), HEAD, identity)
    element, _ = agent.answer(b"1", head.start())
    assert agent.answer(b"1", head.confirm(element))[1] == HEAD


@pytest.mark.parametrize("seen", [PairIdentity("a", "X" * 40), PairIdentity("b", "A" * 40)])
def test_somebody_between_them_cannot_put_in_another_key_or_name(agent, seen):
    code = agent.open()
    agent.answer(b"1", HEAD)
    head = HeadSide(code, HEAD, seen)
    element, _ = agent.answer(b"1", head.start())
    reply, trusted = agent.answer(b"1", head.confirm(element))
    assert isinstance(reply, PairRefused)
    assert trusted is None


def test_an_agent_that_does_not_know_the_code_is_noticed():
    impostor = AgentSide("a", "A" * 40, Clock())
    impostor.open()
    code = wrong(impostor._code or "")
    head = HeadSide(code, HEAD, impostor._identity)
    impostor.answer(b"1", HEAD)
    element, _ = impostor.answer(b"1", head.start())
    head.confirm(element)
    with pytest.raises(UsageError, match="wrong"):
        head.check(PairProof(bytes(32)))


def test_the_order_is_kept_and_rubbish_is_refused(agent):
    code = agent.open()
    assert isinstance(agent.answer(b"1", PairStart(b"A" + bytes(32)))[0], PairRefused)
    identity, _ = agent.answer(b"1", HEAD)
    assert isinstance(agent.answer(b"1", PairConfirm(bytes(32)))[0], PairRefused)
    for element in (b"", b"A", b"A" + bytes(32), b"B" + bytes(32), b"A" * 99):
        agent.open()
        agent.answer(b"1", HEAD)
        assert isinstance(agent.answer(b"1", PairStart(element))[0], PairRefused)
    with pytest.raises(UsageError, match="6 digits"):
        HeadSide(code + "0", HEAD, identity)
    with pytest.raises(UsageError, match="6 digits"):
        HeadSide("12345x", HEAD, identity)


def test_many_who_only_knock_do_not_fill_the_memory(agent):
    code = agent.open()
    for number in range(100):
        agent.answer(b"%d" % number, HEAD)
    assert len(agent._heads) <= MOST_RUNS
    assert attempt(agent, code, b"at last") == HEAD


def test_trust_is_kept_in_files_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    trust = Trust("agent")
    identity = trust.identity()
    assert Trust("agent").identity() == identity != Trust("head").identity()
    trust.add("head", Peer("H" * 40))
    assert Trust("agent").peers() == {"head": Peer("H" * 40)}
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "agent").iterdir()} == {0o600}
    trust.forget("head")
    assert trust.peers() == {}
    with pytest.raises(UsageError, match="head is not paired"):
        trust.forget("head")
    (tmp_path / "agent" / "peers.json").write_text("[")
    with pytest.raises(ConfigError, match=r"peers\.json cannot be read"):
        trust.peers()
    for bad in ("", "../x", "a b", "x" * 64):
        with pytest.raises(ConfigError):
            checked_name(bad)
