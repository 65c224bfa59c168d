{{/* Parts of a pod that router and members share. All take (dict "root" $ "role" "router"), where not said otherwise. */}}

{{/*
The whole end of a pod: preStop, then the process's own budget, then 15 s for closing servers and flushing spans (the
process gives each of them 3 s). The process ends earlier when nothing runs any more.
*/}}
{{- define "tandem.graceSeconds" -}}
{{- $drain := (get .root.Values .role).drain -}}
{{- add (int $drain.preStopSeconds) (int $drain.timeoutSeconds) 15 -}}
{{- end -}}

{{- define "tandem.lifecycle" -}}
{{- $seconds := int (get .root.Values .role).drain.preStopSeconds -}}
{{- if $seconds -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $seconds }}
{{- end -}}
{{- end -}}

{{/*
Names of the health service: "readiness" is no until the model is loaded and again while draining, "liveness" is yes as
long as the process does its work. Call with (dict "root" $ "port" 50051).
*/}}
{{- define "tandem.probes" -}}
{{- $services := dict "startup" "readiness" "readiness" "readiness" "liveness" "liveness" -}}
{{- range $kind := list "startup" "readiness" "liveness" }}
{{- $probe := get $.root.Values.probes $kind }}
{{ $kind }}Probe:
  grpc:
    port: {{ include "tandem.probePort" $ }}
    service: {{ get $services $kind }}
  periodSeconds: {{ int $probe.periodSeconds }}
  timeoutSeconds: {{ int $probe.timeoutSeconds }}
  failureThreshold: {{ int $probe.failureThreshold }}
{{- end }}
{{- end -}}

{{/* Ports of the container by name. Call with (dict "root" $ "role" "router" "port" 50051). */}}
{{- define "tandem.containerPorts" -}}
{{- $values := .root.Values -}}
- name: grpc
  containerPort: {{ int .port }}
{{- if and (eq .role "router") $values.router.http.enabled }}
- name: http
  containerPort: {{ int $values.router.http.port }}
{{- end }}
{{- if $values.metrics.enabled }}
- name: metrics
  containerPort: {{ int $values.metrics.port }}
{{- end }}
{{- if $values.tls.enabled }}
- name: health
  containerPort: {{ int $values.tls.healthPort }}
{{- end }}
{{- end -}}

{{/* Longer than the longest start, so that a rollout with a slow load is not called failed. */}}
{{- define "tandem.progressSeconds" -}}
{{- $startup := .root.Values.probes.startup -}}
{{- add (mul (int $startup.periodSeconds) (int $startup.failureThreshold)) 600 -}}
{{- end -}}

{{/* replicas null, or `scaling`: an autoscaler owns the number, and writing one here would undo its work at each upgrade. */}}
{{- define "tandem.replicas" -}}
{{- $replicas := (get .root.Values .role).replicas -}}
{{- if not (or (kindIs "invalid" $replicas) (include "tandem.scaled" .)) -}}
replicas: {{ int $replicas }}
{{- end -}}
{{- end -}}

{{/* rollingUpdate stays in the merged values when somebody chooses Recreate, and the API refuses both together. */}}
{{- define "tandem.strategy" -}}
{{- $strategy := (get .root.Values .role).strategy -}}
type: {{ $strategy.type }}
{{- if eq $strategy.type "RollingUpdate" }}
rollingUpdate:
  {{- toYaml $strategy.rollingUpdate | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
What every pod has. enableServiceLinks is off because a Service named tandem-metrics would otherwise become the variable
TANDEM_METRICS_PORT, which is a setting.
*/}}
{{- define "tandem.podSpec" -}}
{{- $own := get .root.Values .role -}}
serviceAccountName: {{ include "tandem.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" . }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .root.Values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ .root.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "tandem.selectorLabels" . | nindent 8 }}
    matchLabelKeys: [{{ ternary "leaderworkerset.sigs.k8s.io/template-revision-hash" "pod-template-hash" (ne (include "tandem.isGrouped" .) "") }}]
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with get $own $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: models
  {{- if .Values.modelCache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.modelCache.existingClaim }}
    readOnly: {{ .Values.modelCache.readOnly }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.sizeLimit }}
  {{- end }}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: models
  mountPath: /var/cache/tandem
  {{- with .Values.modelCache.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: {{ .Values.modelCache.readOnly }}
{{- end -}}

{{/* HOME: the user of the container has no folder of its own, and libraries keep caches there. USER: it has no name either. */}}
{{- define "tandem.env" -}}
- name: HOME
  value: /tmp
- name: USER
  value: tandem
- name: TANDEM_CACHE
  value: /var/cache/tandem
{{- end -}}

{{- define "tandem.podEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}

{{/* Puts the model into the cache; ends at once when it is there. */}}
{{- define "tandem.initContainers" -}}
{{- if .root.Values.model.pull -}}
initContainers:
  - name: pull-model
    image: {{ include "tandem.image" . | quote }}
    imagePullPolicy: {{ include "tandem.pullPolicy" . }}
    securityContext:
      {{- toYaml .root.Values.containerSecurityContext | nindent 6 }}
    command: ["python", "-m", "tandem_cli", "models", "pull", {{ .root.Values.model.name | quote }}]
    env:
      {{- include "tandem.env" . | nindent 6 }}
      {{- with .root.Values.model.pullEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources:
      requests:
        cpu: 100m
        memory: 256Mi
      limits:
        memory: 1Gi
    volumeMounts:
      {{- include "tandem.volumeMounts" .root | nindent 6 }}
{{- end -}}
{{- end -}}
