"""`megatron-flags`: flags change, all else in a script stays as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.flag_answers import answer_rows
from megatron_hybrid import megatron_flags
from megatron_hybrid.launch_script import Handling, rewrite
from megatron_hybrid.shell_words import ShellSyntaxError
from tests.unit_tests.tools.test_shell_words import TEXTS

SCRIPT = """\
#!/bin/bash
# A comment with --use-mcore-models in it.
PP=1
GBS=8
RUN=${1:-run}   # where
LAUNCHER=(--nproc_per_node 8 --master_addr "$HOST")
MODEL=(
    --use-mcore-models
    --num-layers 4   # deep
\t--train-samples 800
    --pipeline-model-parallel-size $PP
    --attention-backend auto # any
    "--split '99,1,0'"
    "--tiktoken-pattern v2"
)
EXTRA="--lr 1e-3 \\
  --recompute-activations \\
  --log-throughput"
if [ -n "$FP8" ]; then
    MODEL+=(--fp8-format hybrid --bf16)
fi
nsys profile --trace=gpu --some-graph x true
torchrun ${LAUNCHER[@]} pretrain_gpt.py "${MODEL[@]}" $EXTRA \\
    --global-batch-size ${GBS} \\
    --batch-size $((1 + 1)) \\
    --sequence-parallel "$@"
"""
REWRITTEN = """\
#!/bin/bash
# A comment with --use-mcore-models in it.
PP=1
GBS=8
RUN=${1:-run}   # where
LAUNCHER=(--nproc_per_node 8 --master_addr "$HOST")
MODEL=(
    --num-layers 4   # deep
\t--train-iters 100
    # any
    "--split '99,1,0'"
)
EXTRA="--lr 1e-3 \\
  --recompute-granularity selective"
if [ -n "$FP8" ]; then
    MODEL+=(--fp8-format hybrid --bf16)
fi
nsys profile --trace=gpu --some-graph x true
torchrun ${LAUNCHER[@]} pretrain_gpt.py "${MODEL[@]}" $EXTRA \\
    --global-batch-size ${GBS} \\
    --micro-batch-size $((1 + 1)) \\
    "$@"
"""
COMMAND = "torchrun pretrain_gpt.py --position-embedding-type rope"


def outcomes(text: str) -> dict[str, Handling]:
    return {one.given.split()[0]: one.handling for one in rewrite(text).findings}


def test_flags_change_and_everything_else_stays():
    found = rewrite(SCRIPT)
    assert found.text == REWRITTEN
    assert [one.given for one in found.findings if one.handling is Handling.UNSUPPORTED] == [
        "--fp8-format hybrid"
    ]
    assert rewrite(REWRITTEN).text == REWRITTEN, "there is nothing left to change"
    without = rewrite(SCRIPT, removes_unsupported=True).text
    assert without == REWRITTEN.replace("(--fp8-format hybrid --bf16)", "(--bf16)")


@pytest.mark.parametrize(
    ("before", "flags", "outcome"),
    [
        ("PP=1", "--pipeline-model-parallel-size $PP", Handling.DELETED),
        ("PP=2", "--pipeline-model-parallel-size ${PP}", Handling.UNSUPPORTED),
        ("PP=2; if a; then PP=4; fi", "--pipeline-model-parallel-size $PP", Handling.UNSUPPORTED),
        ("PP=1; if a; then PP=4; fi", "--pipeline-model-parallel-size $PP", Handling.UNDECIDED),
        ("PP=${PP:-1}", "--pipeline-model-parallel-size $PP", Handling.UNDECIDED),
        ("", "--pipeline-model-parallel-size=1", Handling.DELETED),
        ("", "--pipeline-model-parallel-size '1'", Handling.DELETED),
        ("", "--train-samples 8", Handling.UNDECIDED),
        ("", "--lr-warmup-samples 0", Handling.REPLACED),
        ("N=8", "--train-samples $N --global-batch-size 4", Handling.REPLACED),
        ("", "--train-samples $N --global-batch-size 4", Handling.UNDECIDED),
        ("", "--vocab-file $V", Handling.UNDECIDED),
        ("F=torch", "--ckpt-format $F", Handling.REPLACED),
        ("F=fsdp_dtensor", "--ckpt-format $F", None),
        ("", "--ckpt-format $F", Handling.UNDECIDED),
        ("", "--transformer-impl $IMPL", Handling.DELETED),
        ("", "--hiden-size 8", Handling.UNKNOWN),
        ("", "--hidden-size $H", None),
    ],
)
def test_what_becomes_of_a_flag_may_depend_on_a_variable(before, flags, outcome):
    found = outcomes(f"{before}\n{COMMAND} {flags}\n")
    assert found.get(flags.split()[0].split("=")[0]) is outcome or (
        found.get(flags.split()[0]) is outcome
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The number of a redirection is no value, and what follows is the command's still.
        ("--train-samples 80 2>&1 | tee log", "--train-iters 10 2>&1 | tee log"),
        ("--transformer-impl local 2>/dev/null", "2>/dev/null"),
        ("--seed 2 --use-mcore-models>log", "--seed 2 >log"),
        ("--train-samples ${N}>log", "--train-iters 10 >log"),
        ("--data-path <(a) --manual-gc > >(tee log)", "--data-path <(a) > >(tee log)"),
        (">log --transformer-impl local --lr 1", ">log --lr 1"),
        # Quotes stay in pairs, and several words do not become one.
        ("\"--train-samples\" '80' --lr 1", "--train-iters 10 --lr 1"),
        ("'--train-samples=80' --lr 1", "--train-iters 10 --lr 1"),
        ('--train-samples="80" --lr 1', "--train-iters 10 --lr 1"),
        ('"--batch-size=$B 1"', '--micro-batch-size "$B 1"'),
        ("'--use-mcore-models' --lr 1", "--lr 1"),
        ("\\\r\n  --use-mcore-models \\\r\n  --lr 1\r", "\\\r\n  --lr 1\r"),
    ],
)
def test_what_stands_around_a_flag_stays_as_bash_reads_it(before, after):
    command = f"{COMMAND} --global-batch-size 8"
    assert rewrite(f"N=80\n{command} {before}\n").text == f"N=80\n{command} {after}\n"


def test_a_command_in_a_string_ends_at_an_operator_without_a_blank():
    command = 'srun bash -c "torchrun pretrain_gpt.py --global-batch-size 8'
    for before, after in (
        (" --train-samples 80; echo", " --train-iters 10; echo"),
        (" --sequence-parallel; echo", "; echo"),
        (" --transformer-impl local>log", " >log"),
    ):
        assert rewrite(f'{command}{before}"\n').text == f'{command}{after}"\n'


def test_a_quoted_flag_in_an_array_is_one_word_before_and_two_after():
    text = 'A=("--train-samples=80")\ntorchrun pretrain_gpt.py --global-batch-size 8 "${A[@]}"\n'
    assert rewrite(text).text == text.replace('"--train-samples=80"', "--train-iters 10")


def test_a_variable_that_an_inner_script_sets_is_not_the_outer_ones():
    flags = "pretrain_gpt.py --global-batch-size $B --train-samples 80"
    for text in (
        f"B=8\ncat <<'END' >job.sh\nB=16\ntorchrun {flags}\nEND\n",
        f"B=8\nsrun bash -c 'B=16; torchrun {flags}'\n",
    ):
        assert outcomes(text)["--train-samples"] is Handling.UNDECIDED


def test_a_variable_may_hold_a_flag_without_quotes():
    text = "A=--use-mcore-models\nB=--squared-relu\ntorchrun pretrain_gpt.py $A $B --lr 1\n"
    expected = text.replace("--use-mcore-models", "")
    expected = expected.replace("--squared-relu", '"--activation-func squared_relu"')
    assert rewrite(text).text == expected


def test_variables_stay_where_a_value_only_moves():
    text = f"B=4\n{COMMAND} --batch-size $B --encoder-seq-length=${{S}}\n"
    expected = f"B=4\n{COMMAND} --micro-batch-size $B --seq-length ${{S}}\n"
    assert rewrite(text).text == expected


def test_flags_of_other_programs_are_left_alone():
    for command in (
        "srun --use-mcore-models --manual-gc --log-throughput x",
        "python tools/run_text_generation_server.py --use-mcore-models",
        "ARGS=(--use-mcore-models)\npython report.py ${ARGS[@]}",
    ):
        found = rewrite(command + "\n")
        assert found.text == command + "\n"
        assert found.num_flags == 0


def test_a_file_of_arrays_that_others_read_is_rewritten_too():
    found = rewrite("MODEL_ARGS=(\n    --use-mcore-models\n    --num-layers 2\n)\n")
    assert found.text == "MODEL_ARGS=(\n    --num-layers 2\n)\n"


def test_commands_in_strings_and_here_documents_are_read():
    text = (
        'ARGS=(--manual-gc --lr 1)\nRUN="cd $DIR; python $DIR/pretrain_gpt.py ${ARGS[@]} '
        "--use-flash-attn > log\"\nsbatch <<EOF\nit's\nEOF\n"
        "bash <<EOF\ntorchrun pretrain_gpt.py \\\n  --no-rope-fusion\nEOF\n"
    )
    assert rewrite(text).text == (
        'ARGS=(--lr 1)\nRUN="cd $DIR; python $DIR/pretrain_gpt.py ${ARGS[@]} > log"\n'
        "sbatch <<EOF\nit's\nEOF\nbash <<EOF\ntorchrun pretrain_gpt.py\nEOF\n"
    )


def test_a_command_in_a_variable_may_have_several_lines():
    command = 'CMD="torchrun pretrain_gpt.py\n  --num-layers 2\n  --manual-gc\n  --bf16\n"\n$CMD\n'
    assert rewrite(command).text == command.replace("  --manual-gc\n", "")


def test_quotes_and_operators_in_a_string_of_arguments_are_letters():
    text = (
        "X=\"--no-such <a> it's \\\n  --manual-gc --split '99,1 0'\"\ntorchrun pretrain_gpt.py $X\n"
    )
    assert rewrite(text).text == text.replace(" --manual-gc", "")
    assert "--no-such <a> it's" in [one.given for one in rewrite(text).findings]


def test_another_program_of_megatrons_is_named():
    (found,) = rewrite("torchrun pretrain_bert.py --num-layers 2\n").findings
    assert (found.handling, found.given) == (Handling.UNSUPPORTED, "pretrain_bert.py")


FLAGS = [name for row in answer_rows() for name in row.flags if "*" not in name]
WORDS = st.sampled_from(
    [*FLAGS, "--lr", "--num-layers", "--unknown", "1", "torch", "$X", '"a b"', "'--manual-gc 1'"]
)
GAPS = st.sampled_from([" ", " \\\n    ", "  "])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORDS, GAPS), max_size=12), st.booleans())
def test_a_second_run_changes_nothing_and_the_script_still_parses(flags, removes):
    text = "X=1\ntorchrun pretrain_gpt.py " + "".join(a + gap for a, gap in flags) + "end\ndone=1\n"
    found = rewrite(text, removes_unsupported=removes)
    assert rewrite(found.text, removes_unsupported=removes).text == found.text
    assert found.text.startswith("X=1\ntorchrun pretrain_gpt.py")
    assert found.text.endswith("\ndone=1\n")


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_any_text_is_rewritten_or_refused(text):
    try:
        found = rewrite(text)
    except ShellSyntaxError:
        return
    assert rewrite(found.text).text == found.text
    if not found.findings:
        assert found.text == text


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    path.chmod(0o750)
    return path


def test_the_program_writes_to_stdout_and_reports_on_stderr(script, capsys):
    assert megatron_flags.main([str(script)]) == megatron_flags.EXIT_LEFT
    printed = capsys.readouterr()
    assert printed.out == REWRITTEN
    assert script.read_text() == SCRIPT
    assert printed.err.splitlines()[0] == f"{script}: 15 flags; 9 changed, 1 left to you."
    assert "    line 10: --train-samples 800  " in printed.err
    assert "  now --train-iters 100. Runs count" in printed.err
    assert max(len(line) for line in printed.err.splitlines()[1:]) <= 100


def test_it_writes_over_its_input_only_when_told(script, capsys):
    assert megatron_flags.main([str(script), "--output", str(script)]) == 2
    assert "expected another file than" in capsys.readouterr().err
    for output in (script.parent, script.parent / "missing" / "y.sh"):
        assert megatron_flags.main([str(script), "--output", str(output)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert script.read_text() == SCRIPT

    output = script.with_name("here.sh")
    arguments = [str(script), "--remove-unsupported"]
    assert megatron_flags.main([*arguments, "--output", str(output)]) == 0
    assert megatron_flags.main([*arguments, "--in-place"]) == 0
    assert script.read_text() == output.read_text() != SCRIPT
    assert {path.stat().st_mode & 0o777 for path in (script, output)} == {0o750}
    assert sorted(path.name for path in script.parent.iterdir()) == ["here.sh", "train.sh"]
    subprocess.run(["bash", "-n", script], check=True)

    capsys.readouterr()
    assert megatron_flags.main([str(script), "--in-place"]) == 0, "there is nothing left to do"
    assert "0 changed, 0 left to you" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Expected a bash script, got"),
        (b"a\0b", "expected a bash script, got a binary file."),
        (b"a\n'b", "line 2: expected a bash script, got a quote without an end."),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, content, message):
    path, output = tmp_path / "x.sh", tmp_path / "y.sh"
    if content is not None:
        path.write_bytes(content)
    assert megatron_flags.main([str(path), "--output", str(output)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not output.exists()


def test_bytes_that_are_no_utf8_stay(tmp_path):
    path = tmp_path / "x.sh"
    path.write_bytes(b"# caf\xe9\r\n" + COMMAND.encode() + b" --manual-gc\r\n")
    assert megatron_flags.main([str(path), "--in-place"]) == 0
    assert path.read_bytes() == b"# caf\xe9\r\n" + COMMAND.encode() + b"\r\n"


def test_positions_that_are_not_given_are_others_here():
    text = "torchrun pretrain_gpt.py --hidden-size 8\n"
    assert outcomes(text) == {"--position-embedding-type": Handling.DEFAULT}
    assert rewrite(text).text == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""),
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1 # for PP\n", "# for PP\n"),
        ("export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}\n", ""),
        ("export A=2\nexport CUDA_DEVICE_MAX_CONNECTIONS='1'\r\nB=3\n", "export A=2\nB=3\n"),
        # Where bash needs a word or a statement, it gets one.
        (
            "if a; then\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nfi\n",
            "if a; then\nexport CUDA_DEVICE_MAX_CONNECTIONS=32\nfi\n",
        ),
        (
            "cd x && export CUDA_DEVICE_MAX_CONNECTIONS=1 && cd y\n",
            "cd x && export CUDA_DEVICE_MAX_CONNECTIONS=32 && cd y\n",
        ),
        (
            "cd x && \\\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n",
            "cd x && \\\nexport CUDA_DEVICE_MAX_CONNECTIONS=32\n",
        ),
        (
            'docker run -e "CUDA_DEVICE_MAX_CONNECTIONS=1" image\n',
            'docker run -e "CUDA_DEVICE_MAX_CONNECTIONS=32" image\n',
        ),
        (
            "export A=2 CUDA_DEVICE_MAX_CONNECTIONS=1\n",
            "export A=2 CUDA_DEVICE_MAX_CONNECTIONS=32\n",
        ),
    ],
)
def test_a_single_hardware_queue_goes_with_a_reason(before, after):
    found = rewrite(f"{before}{COMMAND} --manual-gc --lr 1\n")
    assert found.text == f"{after}{COMMAND} --lr 1\n"
    ours = [one for one in found.findings if "CUDA_DEVICE_MAX_CONNECTIONS" in one.given]
    assert [one.line for one in ours] == [before[: before.index("CUDA_")].count("\n") + 1]
    assert ours[0].why in " ".join(" ".join(megatron_flags.report(Path("x.sh"), found)).split())
    subprocess.run(["bash", "-n", "-c", found.text], check=True)
    assert rewrite(found.text).text == found.text


@pytest.mark.parametrize(
    "kept",
    [
        "export CUDA_DEVICE_MAX_CONNECTIONS=8",
        "export CUDA_DEVICE_MAX_CONNECTIONS=10",
        "# export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
        "export MY_CUDA_DEVICE_MAX_CONNECTIONS=1",
    ],
)
def test_other_numbers_of_hardware_queues_stay(kept):
    text = f"{kept}\n{COMMAND} --lr 1\n"
    assert rewrite(text).text == text
