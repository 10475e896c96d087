#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# The main example trains over a link between two machines (link.sh), which takes 1 ms each way and loses one packet in
# 500: by TCP, by machines of process ranks (also sharded), by Gloo if it was built with it, and by MPI if there is an
# mpirun of Open MPI, with roll calls by MPI and by TCP. Its result must be that of threads. Then the link is cut for
# good in the middle of all but TCP: each rank must say within its deadline what it misses.
#   two_machines.sh TRAIN_TEXT FOLDER [MPIRUN]
# Exit status: 0 if all is well, 1 if not, 77 if this machine has no right to make namespaces, or no ip.
set -euo pipefail
# shellcheck source=tests/network/link.sh
. "${BASH_SOURCE%/*}/link.sh"
train=$(realpath "$1")
mpirun=${3-}
deadline=6  # seconds: other tests run beside ranks that are healthy
patience=45 # seconds until all ranks have ended after a cut, on a busy machine: deadlines, and questions after them

folder=$2/two_machines.$$
clean() {
    local status=$?
    link_close
    [ $status -eq 1 ] && tail -n 20 "$folder"/*.log
    rm -rf "$folder"
    exit $status
}
trap clean EXIT
mkdir -p "$folder"
link_open 1 500

fail() {
    echo "two_machines.sh: $*"
    exit 1
}
for text in a:450 b:150 c:300 d:100; do # d is held out
    printf "${text%%:*} text; %.0s" $(seq "${text#*:}") >"$folder/${text%%:*}.txt"
done
texts=("$folder"/{a,b,c,d}.txt)
digest() { sed -n 's/^digest of parameters *\([0-9a-f]*\).*/\1/p' "$1"; }

# What each way starts in the background, with further arguments of the example. Rank or machine N writes N.log.
export JOINABLE_ADDR=10.77.0.1 JOINABLE_PORT=4711 JOINABLE_SECRET=$name JOINABLE_JOB=$name
start_tcp() { start_ranks tcp "$@"; }
start_gloo() { start_ranks gloo "$@"; }
start_ranks() { # communicator
    local communicator=$1 rank space
    shift
    for rank in 0 1 2 3; do
        space=$([ $rank -lt 2 ] && echo "$a" || echo "$b")
        JOINABLE_RANK=$rank JOINABLE_WORLD_SIZE=4 ip netns exec "$space" "$train" "${texts[@]}" \
            --communicator "$communicator" "$@" >"$folder/$rank.log" 2>&1 &
    done
}
start_machines() {
    local machine space
    for machine in 0 1; do
        space=$([ $machine -eq 0 ] && echo "$a" || echo "$b")
        JOINABLE_RANK=$machine JOINABLE_WORLD_SIZE=2 ip netns exec "$space" "$train" "${texts[@]}" \
            --communicator machines --ranks 2 "$@" >"$folder/$machine.log" 2>&1 &
    done
}
start_mpi() {
    cat >"$folder/rank" <<END # what ranks print cannot travel over a link that is cut
#!/usr/bin/env bash
exec "\$@" >"$folder/\$OMPI_COMM_WORLD_RANK.log" 2>&1
END
    chmod +x "$folder/rank"
    link_mpirun "$mpirun" "$folder" 2 "$folder/rank" "$train" "${texts[@]}" --communicator mpi "$@" \
        >"$folder/mpirun.log" 2>&1 </dev/null &
}
start_mpi_with_tcp() { start_mpi --tcp-roll-calls "$@"; }
ranks() { # processes of the example that run on both machines
    local space process
    for space in "$a" "$b"; do
        for process in $(ip netns pids "$space"); do
            [ "$(readlink "/proc/$process/exe")" != "$train" ] || echo "$process"
        done
    done
}
wait_for() { # what, seconds, what ends it
    local what=$1 end=$((SECONDS + $2))
    shift 2
    until "$@"; do
        [ $SECONDS -lt $end ] || fail "$what"
        sleep 0.1
    done
}
have_jobs_ended() { [ -z "$(jobs -rp)" ]; }
have_ranks_ended() { [ -z "$(ranks)" ]; }
sent() { link_count "$a" tx_bytes; }
has_sent_since() { [ "$(sent)" -gt $(($1 + 3000000)) ]; } # the parameters have 50 kB: some rounds
say() { [ "$(grep -cE "$3" "$folder/$1.log")" -ge "$2" ]; }

train_whole() { # way, further arguments of the example
    local way=$1 what="$*" expected
    shift
    rm -f "$folder"/[0-9].log
    "$train" "${texts[@]}" --epochs 1 --ranks 4 "$@" >"$folder/threads.log" 2>&1
    expected=$(digest "$folder/threads.log")
    "start_$way" --epochs 1 "$@"
    wait_for "$what has not ended" 60 have_jobs_ended
    [ "$(digest "$folder/0.log")" = "$expected" ] || fail "$what has another digest than the threads, $expected"
    echo "$what: two machines train to the digest of threads, $expected"
}
train_until_cut() { # way, number of logs, ranks that write into each, a regular expression for what each must say
    local way=$1 logs=$2 writers=$3 said=$4 log before
    rm -f "$folder"/[0-9].log
    before=$(sent)
    "start_$way" --epochs 1000 --deadline $deadline
    wait_for "$way does not train" 60 has_sent_since "$before"
    link_cut
    local began=$SECONDS
    for ((log = 0; log < logs; ++log)); do
        wait_for "$way: $log.log does not say: $said" $patience say "$log" "$writers" "$said"
    done
    wait_for "$way: ranks have not ended: $(ranks)" $patience have_ranks_ended
    echo "$way: $((SECONDS - began)) s after the cut all ranks have ended, and said what they miss:"
    grep -hE "$said" "$folder"/[0-9].log
    link_kill # mpirun and its daemon never learn of the cut
    wait 2>/dev/null || true
    link_mend
}
train_whole tcp
train_whole machines
for sharding in optimizer gradients parameters; do
    train_whole machines --optimizer adam --sharding $sharding
done
if [ "$link" != plain ]; then
    read -r round_trip _ <<<"$(link_probe 1)"
    [ "$round_trip" -ge 2000 ] || fail "a round trip takes $round_trip us: the link does not delay"
    lost=$(link_lost)
    [ "$lost" -gt 0 ] || fail "the link has lost no packet"
    echo "until now the link has lost $lost of $(($(link_count "$a" tx_packets) + $(link_count "$b" tx_packets))) packets"
fi
train_until_cut machines 2 2 "within [0-9]+ s"
if grep -q "built with Gloo" <<<"$("$train" "${texts[@]}" --communicator gloo 2>&1)"; then
    echo "skipped: the example was built without Gloo"
else
    train_whole gloo
    train_until_cut gloo 4 1 "within [0-9]+ s|out of reach" # the kernel's word after 30 s, if a rank starves
fi
# Open MPI's mpirun calls itself OpenRTE under every other name, as mpiexec.
if [ -z "$mpirun" ] || ! grep -qE "Open MPI|OpenRTE" <<<"$("$mpirun" --version 2>/dev/null)"; then
    echo "skipped: there is no mpirun of Open MPI, so MPI has not crossed the link"
else
    train_whole mpi
    train_until_cut mpi 4 1 "within [0-9]+ s"
    train_whole mpi_with_tcp
    train_until_cut mpi_with_tcp 4 1 "within [0-9]+ s|out of reach"
fi
