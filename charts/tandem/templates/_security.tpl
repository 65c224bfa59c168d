{{/*
TLS, proofs of being from the cell, and tokens of clients. All of it comes from secrets, mounted read-only as whole folders, so
that a changed secret reaches the processes, which read the files again. Take (dict "root" $ "role" "router"), where not said
otherwise.
*/}}

{{/* How proxies read the ports of gRPC: the second is what Kubernetes calls HTTP/2 without TLS. Takes the root. */}}
{{- define "tandem.appProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" .Values.tls.enabled -}}
{{- end -}}

{{/* The name on the one certificate of all processes: they are dialled by addresses that nobody knows beforehand. Takes the root. */}}
{{- define "tandem.serverName" -}}
{{- .Values.tls.serverName | default (printf "%s-router.%s.svc" (include "tandem.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* Where the kubelet asks for health: it speaks no TLS. Call with (dict "root" $ "port" 50051). */}}
{{- define "tandem.probePort" -}}
{{- ternary (int .root.Values.tls.healthPort) (int .port) .root.Values.tls.enabled -}}
{{- end -}}

{{/* Every address of the pod, as a listener takes it. Call with (dict "root" $ "port" 50051). */}}
{{- define "tandem.everywhere" -}}
{{- ternary "[::]" "0.0.0.0" (eq .root.Values.ipFamily "IPv6") }}:{{ int .port }}
{{- end -}}

{{- define "tandem.securityArgs" -}}
{{- $tls := .root.Values.tls -}}
{{- $auth := .root.Values.auth -}}
{{- if $tls.enabled -}}
- "--tls-cert-file=/etc/tandem/tls/tls.crt"
- "--tls-key-file=/etc/tandem/tls/tls.key"
- "--tls-ca-file=/etc/tandem/tls/ca.crt"
- "--tls-server-name={{ include "tandem.serverName" .root }}"
- "--health-listen={{ include "tandem.everywhere" (dict "root" .root "port" $tls.healthPort) }}"
{{- if or (ne .role "router") $tls.clientCertificates }}
- "--tls-client-ca-file=/etc/tandem/tls/ca.crt"
- "--internal-identities={{ include "tandem.serverName" .root }}"
{{- end }}
{{- end }}
{{- if $auth.cellSecret.secretName }}
- "--cell-secret-file=/etc/tandem/cell/{{ $auth.cellSecret.secretKey }}"
{{- end }}
{{- if eq .role "router" }}
{{- if $auth.tokens.secretName }}
- "--token-file=/etc/tandem/tokens/{{ $auth.tokens.secretKey }}"
{{- end }}
{{- include "tandem.jwtArgs" $auth.jwt }}
{{- end }}
{{- end -}}

{{/* "true" where clients have to say who they are. Takes the root. */}}
{{- define "tandem.wantsTokens" -}}
{{- $auth := .Values.auth -}}
{{- if or $auth.tokens.secretName $auth.jwt.secretName $auth.jwt.jwksUrl -}}true{{- end -}}
{{- end -}}

{{/* Variables of a client in the cluster, as `tandem --help` lists them. Takes the root. */}}
{{- define "tandem.clientEnv" -}}
{{- if .Values.tls.enabled }}
- name: TANDEM_TLS_CA
  value: /etc/tandem/tls/ca.crt
- name: TANDEM_TLS_NAME
  value: {{ include "tandem.serverName" . | quote }}
{{- if .Values.tls.clientCertificates }}
- name: TANDEM_TLS_CERT
  value: /etc/tandem/tls/tls.crt
- name: TANDEM_TLS_KEY
  value: /etc/tandem/tls/tls.key
{{- end }}
{{- end }}
{{- with .Values.auth.testToken }}
{{- if .secretName }}
- name: TANDEM_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .secretName }}
      key: {{ .secretKey }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes auth.jwt. */}}
{{- define "tandem.jwtArgs" -}}
{{- if or .secretName .jwksUrl }}
{{- if .jwksUrl }}
- "--jwt-jwks-url={{ .jwksUrl }}"
{{- else }}
- "--jwt-{{ ternary "jwks" "key" (eq .form "keySet") }}-file=/etc/tandem/jwt/{{ .secretKey }}"
{{- end }}
- "--jwt-issuer={{ .issuer }}"
- "--jwt-audience={{ .audience }}"
- "--jwt-algorithms={{ join "," .algorithms }}"
{{- end }}
{{- end -}}

{{/* Secrets of a role, by the name of their folder under /etc/tandem: YAML of {folder: secret}. */}}
{{- define "tandem.secrets" -}}
{{- $values := .root.Values -}}
{{- if $values.tls.enabled }}
tls: {{ $values.tls.secretName }}
{{- end }}
{{- if ne .role "test" }}
{{- with $values.auth.cellSecret.secretName }}
cell: {{ . }}
{{- end }}
{{- end }}
{{- if eq .role "router" }}
{{- with $values.auth.tokens.secretName }}
tokens: {{ . }}
{{- end }}
{{- with $values.auth.jwt.secretName }}
jwt: {{ . }}
{{- end }}
{{- with $values.redis.tls.secretName }}
redis: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.secretMounts" -}}
{{- range $folder, $_ := include "tandem.secrets" . | fromYaml }}
- name: secret-{{ $folder }}
  mountPath: /etc/tandem/{{ $folder }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tandem.secretVolumes" -}}
{{- range $folder, $secret := include "tandem.secrets" . | fromYaml }}
- name: secret-{{ $folder }}
  secret:
    secretName: {{ $secret }}
    # For the group that podSecurityContext.fsGroup names, and nobody else.
    defaultMode: 0440
{{- end }}
{{- end -}}
