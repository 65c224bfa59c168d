{{/* Names and labels. */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of every object's name; short enough for "-prefill" and what a Deployment adds to a pod's name. */}}
{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "root" $ "role" "router"). What selectors use: it must never change for a release. */}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* Labels of objects. */}}
{{- define "tandem.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* Labels of pods: without the chart's version, so that a new chart alone does not restart a pool. */}}
{{- define "tandem.podLabels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/part-of: tandem
tandem-metrics: {{ .root.Values.metrics.enabled | quote }}
{{- with (get .root.Values .role).podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* "true" when a pool's members are groups of pods. Call with (dict "root" $ "role" "decode"). */}}
{{- define "tandem.isGrouped" -}}
{{- if gt (int (get .root.Values .role | dig "tensorParallel" "hosts" 1)) 1 -}}true{{- end -}}
{{- end -}}

{{/*
Name of the Deployment or LeaderWorkerSet of a role. That of groups is not the Service's: their controller makes a Service of
the same name for itself.
*/}}
{{- define "tandem.workloadName" -}}
{{- include "tandem.fullname" .root }}-{{ if include "tandem.isGrouped" . }}tp-{{ end }}{{ .role }}
{{- end -}}

{{/* What scales a role, as scaleTargetRef takes it: apiVersion, kind, name. Call with (dict "root" $ "role" "decode"). */}}
{{- define "tandem.scaleTarget" -}}
{{- if include "tandem.isGrouped" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "tandem.workloadName" . }}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Call with (dict "root" $ "role" "router"). */}}
{{- define "tandem.image" -}}
{{- $all := .root.Values.image -}}
{{- $own := (get .root.Values .role).image -}}
{{- $repository := ternary (printf "%s/%s" $all.registry $own.repository) $own.repository (ne ($all.registry | default "") "") -}}
{{- if $own.digest -}}
{{- printf "%s@%s" $repository $own.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($own.tag | default $all.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.pullPolicy" -}}
{{- (get .root.Values .role).image.pullPolicy | default .root.Values.image.pullPolicy -}}
{{- end -}}

{{/* The cell: its keys must not meet those of another release on the same Redis. At most 64 characters. */}}
{{- define "tandem.cell" -}}
{{- $full := printf "%s.%s" .Release.Namespace (include "tandem.fullname" .) -}}
{{- if .Values.cell -}}
{{- .Values.cell -}}
{{- else if le (len $full) 64 -}}
{{- $full -}}
{{- else -}}
{{- printf "%s-%s" (trunc 53 $full) (sha256sum $full | trunc 10) -}}
{{- end -}}
{{- end -}}

{{/* What a router resolves: every address of a pool's headless Service. The last dot spares the search list. */}}
{{- define "tandem.poolTarget" -}}
dns:///{{ include "tandem.fullname" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}.:{{ int .root.Values.memberPort }}
{{- end -}}
