#!/bin/sh
# Record the files of this folder anew: record.sh FOLDER PYTHON_WITH_TORCH_AND_PY_SPY. Needs strace, perf and inotifywait, and root for perf.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1 venv=$2
work=$(mktemp -d) && cd "$work" && cp "$here"/programs/*.py . && trap 'rm -rf "$work"' EXIT
mkdir -p "$out/strace" "$out/pyspy" "$out/perf" "$out/inotify" "$out/flight_recorder"
calls=clone,clone3,openat,sendto,recvfrom,execve,wait4,exit_group,accept4,connect,clock_nanosleep,futex
python="/usr/bin/python3 -I -S"
record() { name=$1; shift; strace "$@" -e trace=$calls -o "$out/strace/$name.txt" $python calls.py; }
record none
record f -f
record f-t -f -t
record f-tt -f -tt
record f-ttt -f -ttt
record f-r -f -r
record f-tt-T -f -tt -T
record f-ttt-T-y -f -ttt -T -y
record f-tt-T-yy -f -tt -T -yy
record f-r-ttt -f -r -ttt
record f-ttt-T-yy-Y-n-i -f -ttt -T -yy -Y -n -i
strace -f -e trace=$calls $python calls.py 2> "$out/strace/f-stderr.txt"
strace -ff -ttt -e trace=$calls -o ff $python calls.py
n=0; for file in ff.*; do n=$((n + 1)); cp "$file" "$out/strace/ff-$n.${file##*.}"; done

$python waiting.py & waiting=$!
sleep 1
for form in "" --locals --native; do
  name=$(echo "dump$form" | tr -d -)
  "$(dirname "$venv")/py-spy" dump $form --pid $waiting > "$out/pyspy/$name.txt"
  "$(dirname "$venv")/py-spy" dump --json $form --pid $waiting > "$out/pyspy/$name.json"
done
kill $waiting

few="import threading, time; t = threading.Thread(target=time.sleep, args=(0.05,)); t.start(); t.join()"
perf record -q -e syscalls:sys_enter_futex -g -o few.data -- $python -c "$few"
perf script --no-inline -i few.data | head -200 > "$out/perf/few.script.txt"
perf script --no-inline --ns -F comm,pid,tid,cpu,time,event,trace -i few.data | head -40 > "$out/perf/fields.script.txt"
perf record -q -k CLOCK_REALTIME -e cpu-clock -F 200 -o clock.data -- $python -c "sum(range(3000000))"
perf script --no-inline -i clock.data | head -20 > "$out/perf/realtime.script.txt"
events=task-clock,context-switches,page-faults,cycles
perf stat -e $events $python -c 1 2> "$out/perf/people.stat.txt"
perf stat -x, -e $events $python -c 1 2> "$out/perf/commas.stat.csv"
perf stat -j -e $events $python -c 1 2> "$out/perf/lines.stat.json"
perf stat -I 50 -e context-switches $python -c "import time; time.sleep(0.12)" 2> "$out/perf/intervals.stat.txt"
perf stat -a -A -x';' -e context-switches sleep 0.05 2> "$out/perf/processors.stat.csv"

mkdir watched
inotifywait -q -m -r watched > "$out/inotify/default.txt" & one=$!
inotifywait -q -m -r --csv watched > "$out/inotify/csv.csv" & two=$!
inotifywait -q -m -r --timefmt %s --format '%T %w %f %e' watched > "$out/inotify/seconds.txt" & three=$!
inotifywait -q -m -r --timefmt %s --format '%T %w%f %e' watched > "$out/inotify/joined.txt" & four=$!
inotifywait -q -m -r --timefmt '%Y-%m-%d %H:%M:%S' --format '%T %w%f %e' watched > "$out/inotify/dated.txt" & five=$!
sleep 1
echo hi > "watched/a b,c.txt"
mv "watched/a b,c.txt" watched/e
rm watched/e
sleep 1
kill $one $two $three $four $five

"$venv" collectives.py 1 "$out/flight_recorder" 29741 & other=$!
"$venv" collectives.py 0 "$out/flight_recorder" 29741
wait $other
