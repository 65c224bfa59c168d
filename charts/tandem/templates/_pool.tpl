{{/*
One pool: a Deployment, or groups of pods where a member takes several hosts, and the headless Service by which routers find
its members. Call with (dict "root" $ "role" "decode").
*/}}
{{- define "tandem.pool" -}}
{{- $own := dict "root" .root "role" .role "port" .root.Values.memberPort -}}
{{- if include "tandem.isGrouped" $own -}}
{{- include "tandem.poolGroups" $own }}
{{- else -}}
{{- include "tandem.poolDeployment" $own }}
{{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" $own | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "tandem.selectorLabels" $own | nindent 4 }}
    {{- if include "tandem.isGrouped" $own }}
    # A group is one member, and its first pod speaks for it.
    leaderworkerset.sigs.k8s.io/worker-index: "0"
    {{- end }}
  ports:
    - name: grpc
      port: {{ int .root.Values.memberPort }}
      targetPort: grpc
      appProtocol: {{ include "tandem.appProtocol" .root }}
{{- end -}}

{{- define "tandem.poolDeployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "tandem.workloadName" . }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- with include "tandem.replicas" . }}
  {{- . | nindent 2 }}
  {{- end }}
  progressDeadlineSeconds: {{ include "tandem.progressSeconds" . }}
  strategy:
    {{- include "tandem.strategy" . | nindent 4 }}
  selector:
    matchLabels:
      {{- include "tandem.selectorLabels" . | nindent 6 }}
  template:
    {{- include "tandem.memberTemplate" . | nindent 4 }}
{{- end -}}

{{/*
LeaderWorkerSet (leaderworkerset.x-k8s.io/v1): each replica is a group of pods that starts, ends and is rolled as one. Every
pod learns its place from LWS_WORKER_INDEX, LWS_GROUP_SIZE and LWS_LEADER_ADDRESS, which the controller sets.
*/}}
{{- define "tandem.poolGroups" -}}
{{- $pool := get .root.Values .role -}}
{{- $template := include "tandem.memberTemplate" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "tandem.workloadName" . }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- with include "tandem.replicas" . }}
  {{- . | nindent 2 }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml $pool.strategy.rollingUpdate | nindent 6 }}
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: {{ int $pool.tensorParallel.hosts }}
    # A model that lost a part of itself is lost as a whole.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- $template | nindent 6 }}
    workerTemplate:
      {{- $template | nindent 6 }}
{{- end -}}

{{/* The pod of a member. */}}
{{- define "tandem.memberTemplate" -}}
{{- $values := .root.Values -}}
{{- $pool := get $values .role -}}
metadata:
  labels:
    {{- include "tandem.podLabels" . | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tandem.podSpec" . | nindent 2 }}
  {{- with include "tandem.initContainers" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "tandem.image" . | quote }}
      imagePullPolicy: {{ include "tandem.pullPolicy" . }}
      securityContext:
        {{- include "tandem.memberSecurityContext" .root | nindent 8 }}
      command: ["python", "-m", "{{ .role }}_svc"]
      args:
        {{- include "tandem.serverArgs" . | nindent 8 }}
        {{- include "tandem.memberArgs" . | nindent 8 }}
        {{- with include "tandem.extraArgs" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env:
        {{- include "tandem.env" .root | nindent 8 }}
        {{- include "tandem.podEnv" .root | nindent 8 }}
        # Whole cores, rounded up; without a request it is 0, which means one thread for each core of the node.
        - name: TANDEM_THREADS
          valueFrom:
            resourceFieldRef:
              containerName: {{ .role }}
              resource: requests.cpu
              divisor: "1"
        {{- with include "tandem.rdmaEnv" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- include "tandem.containerPorts" . | nindent 8 }}
      {{- include "tandem.probes" . | trim | nindent 6 }}
      {{- with include "tandem.lifecycle" . }}
      {{- . | nindent 6 }}
      {{- end }}
      resources:
        {{- include "tandem.memberResources" . | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" .root | nindent 8 }}
        {{- with include "tandem.secretMounts" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- include "tandem.volumes" .root | nindent 4 }}
    {{- with include "tandem.secretVolumes" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pool.shmSize }}
{{- end -}}

{{/* Settings that only members have. */}}
{{- define "tandem.memberArgs" -}}
{{- $values := .root.Values -}}
- "--dtype={{ $values.model.dtype }}"
- "--weight-quantisation={{ $values.model.weightQuantisation }}"
{{- with $values.model.adapters }}
- "--adapters={{ join "," . }}"
{{- end }}
- "--context-tokens={{ int $values.model.contextTokens }}"
- "--page-tokens={{ int $values.model.pageTokens }}"
- "--total-pages={{ int (get $values .role).totalPages }}"
{{- if $values.rdma.enabled }}
- "--transport=rdma"
- "--net-devices={{ $values.rdma.netDevices }}"
{{- else }}
- "--transport=tcp"
- "--net-devices={{ $values.transfer.netDevices }}"
{{- end }}
- "--transfer-ports={{ $values.transfer.portRange }}"
{{- end -}}
