#!/bin/sh
# CoreDNS' place in kubeadm's Deployment: the cluster's domain comes from the Corefile, the identity from the
# pod's service account. The root file system is read-only, /dev/shm is not.
account=/var/run/secrets/kubernetes.io/serviceaccount
domain=$(sed -n 's/^ *kubernetes \([^ ]*\).*/\1/p' /etc/coredns/Corefile)
cat > /dev/shm/kubeconfig <<END
apiVersion: v1
kind: Config
clusters:
- name: cluster
  cluster:
    server: https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT
    certificate-authority: $account/ca.crt
users:
- name: coredns
  user:
    tokenFile: $account/token
contexts:
- name: cluster
  context:
    cluster: cluster
    user: coredns
current-context: cluster
END
exec /usr/local/bin/decapod dns --kubeconfig /dev/shm/kubeconfig --address 0.0.0.0 --domain "$domain" \
    --metrics-bind-address 0.0.0.0:9153,0.0.0.0:8080,0.0.0.0:8181
