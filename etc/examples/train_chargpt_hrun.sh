#!/bin/bash
# The same training without MPI: hrun starts one task per node and torch.distributed joins them, over NCCL where every
# task has a GPU of its own, else over Gloo.  The signal goes to the tasks themselves (no B:).
#
#HSUB --job-name=chargpt-hrun
#HSUB --nodes=2
#HSUB --ntasks-per-node=1
#HSUB --cpus-per-task=1
#HSUB --time=00:10:00
#HSUB --signal=USR1@30
#HSUB --requeue
#HSUB --open-mode=append
#HSUB --output=%x-%j.out

exec hrun python3 -m hpctrain.examples.chargpt \
    --out "${CHARGPT_OUT:-chargpt-$HPCSCHED_JOB_ID}" --target-seconds 80 --checkpoint-every 25 "$@"
