# shellcheck shell=bash
# SPDX-License-Identifier: BSL-1.0
# Sourced: two network namespaces stand for two machines, with a link between them. The kernel's netem delays packets
# and loses some, or relay.py where the kernel has no netem.
#   link_open MILLISECONDS ONE_IN   the delay each way; one packet in ONE_IN is lost, none if 0
#   link_open_at RATE               so many bits a second each way, as tc writes it (100mbit), by the kernel's tbf
# makes the namespaces $a (10.77.0.1) and $b (10.77.0.2), whose device is called $name. `link` says what it became:
# netem, relay, tbf, or plain, without delay and loss. It returns 77, with a line, if this user may not make any.
export PATH=$PATH:/usr/sbin:/sbin
name=jn$$
a=${name}a
b=${name}b
link=
relay=

link_spaces() {
    command -v ip >/dev/null || { echo "skipped: there is no ip: install iproute2" && return 77; }
    ip netns add "$a" 2>/dev/null || { echo "skipped: this user may not make network namespaces" && return 77; }
    ip netns exec "$a" true 2>/dev/null || { echo "skipped: no program can be started in a network namespace" && return 77; }
    ip netns add "$b"
}
link_addresses() {
    local space
    ip -n "$a" address add 10.77.0.1/24 dev "$name"
    ip -n "$b" address add 10.77.0.2/24 dev "$name"
    for space in "$a" "$b"; do
        ip -n "$space" link set lo up
        ip -n "$space" link set "$name" addrgenmode none # or the kernel sends packets of its own, by IPv6
        ip -n "$space" link set "$name" up
    done
}
link_open_at() {
    link_spaces || return
    local space
    link=tbf
    ip link add "$name" netns "$a" type veth peer name "$name" netns "$b" 2>/dev/null ||
        { echo "skipped: there is no virtual link" && return 77; }
    for space in "$a" "$b"; do # a burst is sent at once: half a millisecond of 100 Mbit/s
        ip netns exec "$space" tc qdisc add dev "$name" root tbf rate "$1" burst 6kb latency 1s 2>/dev/null ||
            { echo "skipped: tc or the kernel has no tbf" && return 77; }
    done
    link_addresses
}
link_open() {
    link_spaces || return
    local space loss=()
    [ "$2" -eq 0 ] || loss=(loss "$(awk "BEGIN { print 100 / $2 }")%")
    if ip link add "$name" netns "$a" type veth peer name "$name" netns "$b" 2>/dev/null; then
        link=netem
        for space in "$a" "$b"; do
            ip netns exec "$space" tc qdisc add dev "$name" root netem limit 100000 delay "$1ms" "${loss[@]}" \
                2>/dev/null || link=plain
        done
    fi
    if [ "$link" != netem ]; then
        relay=$(python3 "${BASH_SOURCE%/*}/relay.py" "$a" "$b" "${name}r" "$1" "$2" $$ 2>/dev/null) && link=relay
    fi
    case $link in
    relay)
        ip -n "$a" link delete "$name" 2>/dev/null || true
        for space in "$a" "$b"; do
            ip -n "$space" link set "${name}r" name "$name"
            ip -n "$space" link set "$name" mtu 65000 # each packet costs the relay as much as a large one
        done
        ;;
    plain) echo "skipped: delay and loss: tc or the kernel has no netem, and there is no /dev/net/tun or no python3" ;;
    '') echo "skipped: there is no virtual link" && return 77 ;;
    esac
    link_addresses
}
# From now on all packets are lost. Neither side is told.
link_cut() {
    if [ "$link" = relay ]; then
        kill -USR1 "$relay"
        return
    fi # else frames go to an address that nobody has
    ip -n "$a" neighbour replace 10.77.0.2 lladdr 02:00:00:00:00:77 nud permanent dev "$name"
    ip -n "$b" neighbour replace 10.77.0.1 lladdr 02:00:00:00:00:77 nud permanent dev "$name"
}
link_mend() {
    if [ "$link" = relay ]; then
        kill -USR2 "$relay"
        return
    fi
    ip -n "$a" neighbour flush nud permanent dev "$name"
    ip -n "$b" neighbour flush nud permanent dev "$name"
}
link_count() { # machine, what its device has counted, as tx_bytes
    ip netns exec "$1" cat "/sys/class/net/$name/statistics/$2"
}
link_lost() { # packets, up to now
    local space
    if [ "$link" = netem ]; then
        for space in "$a" "$b"; do
            ip netns exec "$space" tc -s qdisc show dev "$name"
        done | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | awk '{ sum += $1 } END { print sum + 0 }'
    else
        echo $(($(link_count "$a" tx_packets) - $(link_count "$b" rx_packets) + \
            $(link_count "$b" tx_packets) - $(link_count "$a" rx_packets)))
    fi
}
link_probe() { # bytes to send; prints the round trip in microseconds and the megabytes per second
    ip netns exec "$a" python3 "${BASH_SOURCE%/*}/probe.py" serve 10.77.0.1 "$1" &
    ip netns exec "$b" python3 "${BASH_SOURCE%/*}/probe.py" measure 10.77.0.1 "$1"
    wait $!
}
# Starts a program under Open MPI, as many ranks on each machine. Its daemon on the other machine is started by a
# program that takes the place of ssh. Machines need names of their own.
link_mpirun() { # mpirun, a folder, ranks of a machine, the program and its arguments
    local mpirun=$1 folder=$2 ranks=$3
    shift 3
    cat >"$folder/agent" <<END
#!/usr/bin/env bash
shift
exec ip netns exec $b unshare --uts bash -c "hostname $b; \$*"
END
    chmod +x "$folder/agent"
    ip netns exec "$a" unshare --uts bash -c "hostname $a; exec \"\$@\"" - "$mpirun" --allow-run-as-root \
        -H "10.77.0.1:$ranks,10.77.0.2:$ranks" -n $((2 * ranks)) --bind-to none --mca plm_rsh_agent "$folder/agent" \
        --mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24 --mca btl self,vader,tcp "$@"
}
link_kill() { # all processes of both machines
    local space process
    for space in "$a" "$b"; do
        for process in $(ip netns pids "$space" 2>/dev/null); do
            kill -9 "$process" 2>/dev/null || true
        done
    done
}
link_close() {
    link_kill
    [ -z "$relay" ] || kill "$relay" 2>/dev/null || true
    ip netns delete "$a" 2>/dev/null || true # and its end of the link
    ip netns delete "$b" 2>/dev/null || true
}
