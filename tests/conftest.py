"""Checkpoints to look into, and the program to look with."""

import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dist_checkpointing.filesystem import ObjectPath, ObjectStoreOptions
from samples import (
    BACKENDS,
    GOLDEN_NAMES,
    Finished,
    Run,
    Sample,
    Samples,
    dcp_sample,
    golden_sample,
    save_sample,
)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Makes the sample of a backend, or finds the fixture of that name."""
    parent = tmp_path_factory.mktemp("samples")
    made: dict[str, Sample] = {}

    def get(name: str) -> Sample:
        if name not in made:
            if name in GOLDEN_NAMES:
                made[name] = golden_sample(name)
            elif name == "dcp":
                made[name] = dcp_sample(parent / name)
            else:
                made[name] = save_sample(parent / name, BACKENDS[name]())
        return made[name]

    return get


@pytest.fixture(params=list(BACKENDS))
def sample(request: pytest.FixtureRequest, samples: Samples) -> Sample:
    """The sample of every backend of ours."""
    return samples(request.param)


@pytest.fixture(params=[*BACKENDS, "dcp", *GOLDEN_NAMES])
def any_sample(request: pytest.FixtureRequest, samples: Samples) -> Sample:
    """A checkpoint of every backend, of plain DCP, and of real releases of Megatron-Core."""
    return samples(request.param)


@pytest.fixture(scope="session")
def s3_options() -> Iterator[ObjectStoreOptions]:
    """How a simulated S3 server is reached, which has the bucket ``checkpoints``."""
    from s3_servers import moto_server  # late: few tests need it

    with moto_server() as server:
        yield server.place().store.options


@pytest.fixture
def s3_place(s3_options: ObjectStoreOptions) -> ObjectPath:
    """A folder in a simulated S3 server that no other test uses."""
    return ObjectPath.of(f"s3://checkpoints/{uuid.uuid4().hex}", s3_options)


@pytest.fixture
def dckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program in this process with its output in a pipe; compares ``code``, ``err``."""
    from dist_checkpointing.tools.app import main

    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, **expected: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["dckpt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        finished = Finished(code, captured.out, captured.err)
        assert finished == replace(finished, **expected)  # type: ignore[arg-type]
        return finished

    return run
