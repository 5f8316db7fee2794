"""The ranks that serve one copy of a model together.

Requests survive the loss of some of them.

    arrange    which ranks form a generation, and which part each of them gets (pure)
    links      sums, hidden states, steps and results between ranks
    measure    how fast this machine reads and computes weights, and the links between ranks
    runner     what each rank does with a step, and the leader's side
    leader     requests and tokens between leader and front; streams over generations
    rank       a rank's process
    front      starts ranks, keeps their roster, answers the API

Generations of ranks are those of `hpctrain.elastic`.
"""
