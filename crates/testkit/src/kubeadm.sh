#!/bin/bash
# A test host as a machine that kubeadm manages. In: $DIRECTORY, the host's own directory; $DECAPOD, $KUBEADM,
# $KUBECTL, programs. `prepare` gives the host its own /etc, /var/lib and /opt, above those of the real
# machine, and programs in $DIRECTORY/bin. `serve` is the service manager: it runs the kubelet as kubeadm's
# unit file does, whenever `systemctl` of the host says so.
set -u
on=$DIRECTORY/kubelet.on
pid=$DIRECTORY/kubelet.pid

prepare() {
    set -e
    mkdir -p "$DIRECTORY/own" "$DIRECTORY/bin"
    mount -t tmpfs tmpfs "$DIRECTORY/own"
    for place in etc var/lib opt; do
        upper=$DIRECTORY/own/$place/upper work=$DIRECTORY/own/$place/work
        mkdir -p "$upper" "$work"
        mount -t overlay overlay -o "lowerdir=/$place,upperdir=$upper,workdir=$work" "/$place"
    done
    ln -s "$DECAPOD" "$DIRECTORY/bin/kubelet"
    ln -s "$KUBEADM" "$DIRECTORY/bin/kubeadm"
    ln -s "$KUBECTL" "$DIRECTORY/bin/kubectl"
    cat > "$DIRECTORY/bin/systemctl" <<END
#!/bin/bash
end() { [ ! -e $pid ] || kill \$(cat $pid) 2>/dev/null || true; }
case "\$1 \${2:-}" in
"start kubelet" | "restart kubelet") touch $on; end ;;
"stop kubelet") rm -f $on; end ;;
"is-active kubelet") [ -e $on ] && echo active ;;
"is-active "*) echo inactive; exit 3 ;;
esac
END
    chmod 755 "$DIRECTORY/bin/systemctl"
}

serve() {
    while :; do
        if [ -e "$on" ]; then
            KUBELET_KUBEADM_ARGS=
            [ ! -e /var/lib/kubelet/kubeadm-flags.env ] || . /var/lib/kubelet/kubeadm-flags.env
            "$DECAPOD" --data-dir="$DIRECTORY/data" kubelet \
                --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
                --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml \
                $KUBELET_KUBEADM_ARGS --container-runtime-endpoint=embedded &
            echo $! > "$pid"
            wait $!
        fi
        sleep 0.2
    done
}

"$@"
