"""Kill a training again and again at random moments: nothing is ever lost, and nothing is wrong.

    python examples/chaos.py [--kills 40] [--minutes 4] [--world 2] [--seed 0] [--steps 120]

The small GPT is trained with tensor parallelism by real processes, which save behind the training
every few steps. One rank or all of them die of SIGKILL, or only the worker that writes for a rank;
those that survive must notice and end by themselves (or go on, if the worker had nothing to do);
then new processes resume from the latest valid checkpoint. When a training has reached its last
step, another one begins with the next backend, and with or without workers. This fails unless

* every loss, also of steps that are trained again, has the bits of a run that nobody disturbed;
* no life finds less than was committed before it, and none hangs;
* every checkpoint that is left at the end of a training is whole.

The seed decides who dies and when, but not what the victims are doing at that moment.
"""

if __name__ == "__main__":
    # Only here: every process that is spawned imports this file, and needs no rich or matplotlib.
    from chaos_command import main

    main(__doc__)
