#!/bin/bash
# Teach a network that knows the digits 0 to 4 the others, most of its weights frozen, on two nodes (needs scikit-learn).
#
#   hsub train_finetune.sh          start it in a directory that all nodes see
#   hlogs -f JOB                    watch the loss go down
#
# If it is killed, preempted or out of time, it continues from its last checkpoint when it runs again, bit for bit.
# Half a minute before the time limit the script gets SIGUSR1 (B: the script alone) and hands it on to mpirun, which
# passes it to the ranks: they make a checkpoint at the next step and exit with 75, "queue me again".
#
#HSUB --job-name=finetune
#HSUB --nodes=2
#HSUB --ntasks-per-node=1
#HSUB --cpus-per-task=1
#HSUB --time=00:10:00
#HSUB --signal=B:USR1@30
#HSUB --requeue
#HSUB --open-mode=append
#HSUB --output=%x-%j.out

out=${FINETUNE_OUT:-finetune-$HPCSCHED_JOB_ID}

# In the background, so that the shell can take the signal while it waits.
mpirun python3 -m hpctrain.examples.finetune --out "$out" "$@" &
ranks=$!
trap 'kill -USR1 "$ranks"' USR1
trap 'kill -TERM "$ranks"' TERM

# A trap ends `wait` early, so wait until the ranks are gone.
status=0
while :; do
    wait "$ranks"
    status=$?
    kill -0 "$ranks" 2>/dev/null || break
done

python3 -m hpctrain.plot "$out/metrics.jsonl" -o "$out/loss.png" || echo "no picture of the loss (see above)"
exit "$status"
