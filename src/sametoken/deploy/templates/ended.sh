ended() {
    local code
    while :; do
        wait "$1" && code=0 || code=$?
        kill -0 "$1" 2>/dev/null || return "$code"
    done
}
