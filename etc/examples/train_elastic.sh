#!/bin/bash
# Train on as many nodes as are free, one to four: others may have some of them meanwhile, and some may die.
#
#   hsub train_elastic.sh           start it in a directory that all nodes see
#   hlogs -f JOB                    watch ranks come and go, and the loss go down
#
# When a node is lost, the ranks on the others take the very next step. When the scheduler asks for nodes, their ranks leave between
# two steps; nodes that it gives get ranks that take the state from the others. If the first node is lost, or the job is preempted,
# it continues from its last checkpoint when it runs again.
#
#HSUB --job-name=elastic
#HSUB --nodes=1-4
#HSUB --elastic
#HSUB --ntasks-per-node=1
#HSUB --cpus-per-task=1
#HSUB --time=01:00:00
#HSUB --signal=B:USR1@60
#HSUB --requeue
#HSUB --open-mode=append
#HSUB --output=%x-%j.out

out=${ELASTIC_OUT:-elastic-$HPCSCHED_JOB_ID}

# exec: the signals of the job reach it, and it hands them on to the ranks.
exec python3 -m hpctrain.elastic --report "$out.json" -- \
    python3 -m hpctrain.examples.chargpt --out "$out" "$@"
