# snakemake: two rules, one after the other, each a job; their states are asked of the command that is named.
set -e
mkdir "snakemake-$1"
cp "$(dirname "$0")/Snakefile" "snakemake-$1"
cd "snakemake-$1"
snakemake --executor slurm --jobs 2 --default-resources slurm_partition=main --slurm-status-command "$1" \
    --slurm-init-seconds-before-status-checks 2 --nolock > log 2>&1 || { cat log; exit 1; }
test "$(wc -l < b.txt)" = 2
grep -q "3 of 3 steps (100%) done" log
echo "well done"
