// The JavaScript client at work: create, apply, watch, informer, patch, exec, logs, port-forward, delete.
//
// In: a kubeconfig in KUBECONFIG; the name of an image on the node. Out: a line per step; exit code 1, with a
// trace, at the first unexpected result. It works in its own namespace and leaves nothing.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { PassThrough, Readable } from 'node:stream';
import { pathToFileURL } from 'node:url';

// The library is in another directory: NODE_PATH does not work for modules.
const require = createRequire(pathToFileURL(`${process.argv[3]}/`));
const k8s = require('@kubernetes/client-node');

const IMAGE = process.argv[2];
const SPACE = 'client-js';
const LIMIT = 60_000;
const SERVE = 'mkdir /www; echo here > /www/index.html; echo hello; exec httpd -f -p 8080 -h /www';

const kubeconfig = new k8s.KubeConfig();
kubeconfig.loadFromDefault();
const core = kubeconfig.makeApiClient(k8s.CoreV1Api);
const apps = kubeconfig.makeApiClient(k8s.AppsV1Api);
const objects = k8s.KubernetesObjectApi.makeApiClient(kubeconfig);

const manifest = {
  apiVersion: 'apps/v1',
  kind: 'Deployment',
  metadata: { name: 'js', namespace: SPACE },
  spec: {
    replicas: 1,
    selector: { matchLabels: { app: 'js' } },
    template: {
      metadata: { labels: { app: 'js' } },
      spec: {
        terminationGracePeriodSeconds: 0,
        containers: [{ name: 'main', image: IMAGE, command: ['sh', '-c', SERVE] }],
      },
    },
  },
};

// Waits for the first event of a watch that matches.
async function until(path, query, wanted) {
  const watch = new k8s.Watch(kubeconfig);
  let request;
  let timer;
  try {
    await new Promise((resolve, reject) => {
      timer = setTimeout(() => reject(new Error(`${path}: nothing within ${LIMIT} ms`)), LIMIT);
      const seen = (type, object) => wanted(type, object) && resolve();
      const ended = (error) => reject(error ?? new Error(`${path}: the watch ended first`));
      watch.watch(path, query, seen, ended).then((it) => (request = it), reject);
    });
  } finally {
    clearTimeout(timer);
    request?.abort();
  }
}

async function fails(code, reason, call) {
  await assert.rejects(call, (error) => {
    const status = typeof error.body === 'string' ? JSON.parse(error.body) : error.body;
    assert.equal(error.code, code);
    assert.equal(status.reason, reason);
    return true;
  });
}

async function namespace() {
  const body = { metadata: { name: SPACE } };
  await core.createNamespace({ body });
  await fails(409, 'AlreadyExists', () => core.createNamespace({ body }));
  const accounts = `/api/v1/namespaces/${SPACE}/serviceaccounts`;
  await until(accounts, {}, (_, account) => account.metadata.name === 'default');
}

async function deployment() {
  await objects.create(manifest);
  const path = `/apis/apps/v1/namespaces/${SPACE}/deployments`;
  await until(path, {}, (_, it) => it.status?.readyReplicas === 1);
  const seen = await apps.readNamespacedDeployment({ name: 'js', namespace: SPACE });
  seen.metadata.resourceVersion = '1';
  await fails(409, 'Conflict', () => apps.replaceNamespacedDeployment({ name: 'js', namespace: SPACE, body: seen }));
}

async function apply() {
  const body = { apiVersion: 'v1', kind: 'ConfigMap', metadata: { name: 'settings', namespace: SPACE }, data: { a: '1' } };
  const as = (manager, force) =>
    objects.patch(body, undefined, undefined, manager, force, k8s.PatchStrategy.ServerSideApply);
  await as('one');
  body.data.a = '2';
  await fails(409, 'Conflict', () => as('two'));
  assert.equal((await as('two', true)).data.a, '2');
  const merged = await objects.patch(
    { ...body, data: { b: '3' } }, undefined, undefined, 'three', undefined, k8s.PatchStrategy.MergePatch,
  );
  assert.deepEqual(merged.data, { a: '2', b: '3' });
}

// Runs a command; returns its output and status.
async function exec(pod, command, input) {
  const chunks = [];
  const output = new PassThrough().on('data', (chunk) => chunks.push(chunk));
  const status = await new Promise((resolve, reject) => {
    const stdin = input === undefined ? null : Readable.from([input]);
    new k8s.Exec(kubeconfig).exec(SPACE, pod, 'main', command, output, process.stderr, stdin, false, resolve).catch(reject);
  });
  return { printed: Buffer.concat(chunks).toString(), status };
}

async function pods() {
  const list = await core.listNamespacedPod({ namespace: SPACE, labelSelector: 'app=js' });
  const pod = list.items[0].metadata.name;
  const fine = await exec(pod, ['echo', 'from', 'inside']);
  assert.equal(fine.printed, 'from inside\n');
  assert.equal(fine.status.status, 'Success');
  const failed = await exec(pod, ['sh', '-c', 'read x; echo got $x; exit 3'], 'it\n');
  assert.equal(failed.printed, 'got it\n');
  assert.equal(failed.status.reason, 'NonZeroExitCode');
  assert.equal(failed.status.details.causes[0].message, '3');
  assert.equal(await core.readNamespacedPodLog({ name: pod, namespace: SPACE }), 'hello\n');
}

// Reads a forwarded port to its end: the pod's server closes, and so does the WebSocket.
async function forward() {
  const list = await core.listNamespacedPod({ namespace: SPACE, labelSelector: 'app=js' });
  const pod = list.items[0].metadata.name;
  const chunks = [];
  const output = new PassThrough().on('data', (chunk) => chunks.push(chunk));
  const input = new PassThrough();
  const socket = await new k8s.PortForward(kubeconfig).portForward(SPACE, pod, [8080], output, null, input);
  const closed = new Promise((resolve) => socket.on('close', resolve));
  input.write('GET / HTTP/1.0\r\n\r\n');
  const late = setTimeout(() => assert.fail(`the port-forward does not end: ${Buffer.concat(chunks)}`), LIMIT);
  await closed;
  clearTimeout(late);
  assert.match(Buffer.concat(chunks).toString(), /\r\n\r\nhere\n$/);
}

// An informer lists, watches, and gets a change and a deletion.
async function informer() {
  const heard = [];
  const list = () => core.listNamespacedConfigMap({ namespace: SPACE });
  const informer = k8s.makeInformer(kubeconfig, `/api/v1/namespaces/${SPACE}/configmaps`, list);
  const done = new Promise((resolve, reject) => {
    informer.on('error', reject);
    for (const verb of ['add', 'update', 'delete']) {
      informer.on(verb, (object) => {
        if (object.metadata.name !== 'told') return;
        heard.push(verb);
        if (verb === 'delete') resolve();
      });
    }
  });
  await informer.start();
  const metadata = { name: 'told' };
  await core.createNamespacedConfigMap({ namespace: SPACE, body: { metadata } });
  await core.replaceNamespacedConfigMap({ namespace: SPACE, name: 'told', body: { metadata, data: { a: '1' } } });
  await core.deleteNamespacedConfigMap({ namespace: SPACE, name: 'told' });
  const late = setTimeout(() => assert.fail(`the informer heard ${heard} only`), LIMIT);
  await done;
  clearTimeout(late);
  await informer.stop();
  assert.deepEqual(heard, ['add', 'update', 'delete']);
}

async function ending() {
  await fails(404, 'NotFound', () => core.readNamespacedPod({ namespace: SPACE, name: 'nobody' }));
  const gone = until('/api/v1/namespaces', { fieldSelector: `metadata.name=${SPACE}` }, (type) => type === 'DELETED');
  await core.deleteNamespace({ name: SPACE });
  await gone;
}

for (const step of [namespace, deployment, apply, pods, forward, informer, ending]) {
  await step();
  console.log(step.name);
}
